"""The arenas of an instance as others read them, and when they may not. Plain Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relay_service.core.arenas import close_arenas
from relay_service.core.ports import Arena
from relay_service.errors import EpochChanged, NotFound


class Readers:
    """Read-only mappings of all ranks; they outlive their engine while somebody reads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arenas: list[Arena] = []
        self._sequences: list[int] = []
        """Of each arena, while it holds what its manifest says."""
        self._epochs: set[int] = set()
        self._reads = 0
        self._lock = threading.Lock()

    def map(self, map_all: Callable[[], list[Arena]]) -> None:
        """Maps the arenas, unless they are mapped."""
        self._arenas = self._arenas or map_all()

    def follow(self, epochs: set[int], *, news: bool) -> None:
        """Takes over at which epochs they may be read; what is `news` is what they hold now."""
        with self._lock:
            if news:
                self._sequences = [arena.sequence for arena in self._arenas]
            self._epochs = epochs

    @contextmanager
    def reading(self, rank: int, epoch: int) -> Iterator[Arena]:
        """Lends a rank's arena for one read; see `Holding.reading`."""
        arena, known = self._begin(rank, epoch)
        before = arena.sequence
        try:
            if before % 2 or before != known:  # or was, and we have not heard of it yet
                raise EpochChanged(f"{self._name} is being updated")
            yield arena
        finally:
            changed = arena.sequence != before
            with self._lock:
                self._reads -= 1
            if changed:
                raise EpochChanged(f"{self._name} was updated while it was read")

    def current(self, rank: int) -> bool:
        """Whether a rank's arena holds what was said of it last."""
        known = list(zip(self._arenas, self._sequences, strict=False))
        return rank < len(known) and known[rank][0].sequence == known[rank][1]

    def close(self) -> bool:
        """Unmaps unless somebody reads; returns whether it did."""
        with self._lock:
            if not self._reads:
                close_arenas(self._arenas)
            return not self._reads

    def _begin(self, rank: int, epoch: int) -> tuple[Arena, int]:
        with self._lock:
            if not 0 <= rank < len(self._arenas):
                raise NotFound(f"{self._name} has no readable rank {rank}")
            if epoch not in self._epochs:
                now = min(self._epochs, default=0)
                raise EpochChanged(f"{self._name} is at epoch {now}, not {epoch}")
            self._reads += 1
            return self._arenas[rank], self._sequences[rank]
