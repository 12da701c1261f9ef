"""Blocks of a target that are the same bytes: one of them is read, the others are copied.

Plain Python. Replicas of experts and tied tensors are such blocks, on one rank or on several;
so are blocks that the weights beside which new ones land hold in another place. Each copy is
held to its digest where it lands, like a block that came; one that is wrong is read after all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from relay_service.core.receiver import Receiver
from relay_service.errors import EpochChanged

Spot = tuple[int, int]
"""Rank and flat index of a block."""


class Twins:
    """Which blocks need not be read, since they are copied on this host."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        """Groups the blocks of receivers that know what shall land."""
        self._receivers = receivers
        self._groups: dict[bytes, list[Spot]] = defaultdict(list)
        """Places of each digest, in order; of each group the first one is read."""
        self._read_after_all: set[Spot] = set()
        for rank, receiver in enumerate(receivers):
            for index in range(receiver.layout.block_count):
                self._groups[receiver.wanted(index)].append((rank, index))

    def to_read(self, rank: int) -> list[int]:
        """Flat indexes of the blocks of a rank that must be read, in order."""
        return [index for index in self._receivers[rank].missing if self._is_read((rank, index))]

    def settle(self) -> None:
        """Copies what is missing and lies verified on this host already.

        Afterwards the blocks of a group are all there, or all missing, save those that must be
        read after all.
        """
        beside = dict(self._beside())
        for digest, group in self._groups.items():
            missing = [place for place in group if not self._is_there(place)]
            there = next(filter(self._is_there, group), None)
            if not missing or not (there or digest in beside):
                continue
            try:
                data = self._receivers[there[0]].held(there[1]) if there else beside[digest]()
            except EpochChanged:  # what is beside serves no more: this pull is in vain, not over
                self._read_after_all.update(missing)
            else:
                self._copy(missing, memoryview(data))

    def landed(self, rank: int, index: int, data: memoryview) -> None:
        """Copies a block that has come and was verified to everywhere else that it belongs."""
        if self._is_there((rank, index)):
            group = self._groups[self._receivers[rank].wanted(index)]
            others = [p for p in group if not self._is_there(p) and p not in self._read_after_all]
            self._copy(others, data)

    def _copy(self, places: Sequence[Spot], data: memoryview) -> None:
        for rank, index in places:
            if not self._receivers[rank].copy(index, data):
                self._read_after_all.add((rank, index))

    def _beside(self) -> Iterator[tuple[bytes, Callable[[], bytes]]]:
        """Yields each digest that is found beside the arenas, and what reads its bytes there."""
        for receiver in self._receivers:
            if beside := receiver.beside:
                for index in range(beside.manifest.block_count):
                    yield beside.manifest.block_digest(index), partial(beside.read, index)

    def _is_there(self, place: Spot) -> bool:
        return bool(self._receivers[place[0]].verified[place[1]])

    def _is_read(self, place: Spot) -> bool:
        group = self._groups[self._receivers[place[0]].wanted(place[1])]
        return place == group[0] or place in self._read_after_all
