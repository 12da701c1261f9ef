"""Arenas that stay here for a while after their engine has ended. Plain Python.

Each waits for the next life of its instance, which takes it once and copies out of it. Its
memory is given back when its time is over, when another life of that name attaches, when
somebody says so, and with the relay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from relay_service.core.holding import Holding
from relay_service.core.logs import fields
from relay_service.core.manifest import Manifest
from relay_service.core.reclaiming import Take
from relay_service.errors import FormatMismatch, NotFound

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptArena:
    """The arenas of all ranks of an instance that has ended."""

    holding: Holding
    ends_at: float

    @property
    def arena_bytes(self) -> int:
        """Memory that it takes."""
        return sum(manifest.data_bytes for manifest in self.holding.manifests)


class KeptArenas:
    """Kept arenas by instance name: one of each name, each for a limited time."""

    def __init__(
        self, let_go: Callable[[Holding], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`let_go` is given every holding that is kept no longer."""
        self._let_go = let_go
        self._clock = clock
        self._kept: dict[str, KeptArena] = {}

    def __iter__(self) -> Iterator[KeptArena]:
        """Yields what is kept now."""
        self.expire()
        return iter(list(self._kept.values()))

    def seconds_left(self, kept: KeptArena) -> float:
        """Returns the rest of its time."""
        return max(0.0, kept.ends_at - self._clock())

    def keep(self, holding: Holding) -> None:
        """Keeps a detached holding for as long as its engine asked."""
        self.forget(holding.name, "replaced")
        seconds = holding.attach.keep_seconds
        self._kept[holding.name] = KeptArena(holding, self._clock() + seconds)
        _log.info("arena kept", extra=fields(instance=holding.name, seconds=seconds))

    def find(self, name: str, started_as: str) -> KeptArena:
        """Returns what is kept for an instance that was started like that. Raises `NotFound`."""
        self.expire()
        kept = self._kept.get(name)
        if kept is None:
            raise NotFound(f"no arena of {name} is kept here", field="instance", found=name)
        former = kept.holding.attach.started_as
        if former != started_as:
            raise NotFound(
                f"the arena of {name} is kept for one that is started as before",
                field="started_as", expected=former, found=started_as,
            )  # fmt: skip
        return kept

    def take(self, name: str, started_as: str, wanted: Take) -> Holding:
        """Ends the keeping of a holding for its one taker; whoever calls lets go of it.

        Raises `NotFound`, and `FormatMismatch` for a taker of another kind: then it is kept on.
        """
        holding = self.find(name, started_as).holding
        if difference := _difference(holding, wanted):
            raise FormatMismatch(f"the kept arena of {name} does not fit: {difference}")
        del self._kept[name]
        _log.info("arena handed back", extra=fields(instance=name))
        return holding

    def forget(self, name: str, reason: str) -> bool:
        """Lets go of what is kept for an instance; returns whether there was anything."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return False
        _log.info("arena let go: %s", reason, extra=fields(instance=name))
        self._let_go(kept.holding)
        return True

    def expire(self) -> None:
        """Lets go of what was not taken in time."""
        for name in [n for n, kept in self._kept.items() if kept.ends_at <= self._clock()]:
            self.forget(name, "its time is over")


def is_worth_keeping(holding: Holding) -> bool:
    """Whether an engine asked for it and its arenas, on the host, hold verified blocks."""
    wanted = holding.attach.keep_seconds and holding.attach.descriptors_per_rank == 1
    landed = holding.state.fillable and any(one.blocks_verified for one in holding.receivers)
    return bool(wanted) and (holding.state.committed or landed)


def what_lies_in(holding: Holding) -> tuple[Manifest, ...]:
    """Returns its manifests; without the digests of blocks that had yet to land in a dummy."""
    if holding.state.committed:
        return tuple(holding.manifests)
    return tuple(one.layout.with_digests(one.verified) for one in holding.receivers)


def _difference(kept: Holding, wanted: Take) -> str:
    """Says in words how a taker differs; empty when it doesn't. The kept one is the seed."""
    if len(kept.manifests) != len(wanted.manifests):
        return f"ranks: seed {len(kept.manifests)}, target {len(wanted.manifests)}"
    pairs = zip(kept.manifests, wanted.manifests, strict=True)
    return (
        kept.attach.format.difference(wanted.format)
        or kept.placement.difference(wanted.placement)
        or next(filter(None, (mine.layout_difference(theirs) for mine, theirs in pairs)), "")
    )
