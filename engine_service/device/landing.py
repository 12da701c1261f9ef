"""Puts bytes where they belong in an arena, and digests each block when its last byte came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine_service.device.arena import Weights
from relay_service.core.manifest import BLOCK_BYTES, Block, Manifest, TensorEntry

Digest = Callable[[memoryview], bytes]
Fill = Callable[[memoryview, int], None]
"""Fills memory with what lies so many bytes behind the first one of what is being landed."""


class Extent(NamedTuple):
    """Bytes of an arena tensor that will come."""

    tensor: TensorEntry
    first: int
    nbytes: int


class Update(NamedTuple):
    """What a pass over weights that are there already goes by."""

    serves: Manifest
    """With the digests of what is there."""
    partial: bool = False
    """Whether only some tensors come, and the others stay."""
    begin: Callable[[], None] = lambda: None
    """Called before the first byte is written, and perhaps again."""
    unchanged: Callable[[Block], None] = lambda _block: None
    """Called with each block that came and is what was there."""


class Landing:
    """One pass over an arena, in any order."""

    def __init__(
        self, arena: Weights, digest: Digest, coming: Sequence[Extent] | None = None,
        update: Update | None = None,
    ) -> None:  # fmt: skip
        """`digest` digests one block.

        Where not every tensor is `coming`, `update` says what the rest holds.
        """
        manifest = arena.manifest
        self._arena, self._digest = arena, digest
        self._update = update
        self._digests = [b""] * manifest.block_count
        if update and update.partial:
            blocks = range(manifest.block_count)
            self._digests = [update.serves.block_digest(block) for block in blocks]
        self._missing = [0] * manifest.block_count
        self._entries: dict[str, tuple[TensorEntry, int, int]] = {}
        block = 0
        for unit in manifest.units:
            for entry in unit.tensors:
                self._entries[entry.name] = (entry, unit.offset, block)
            block += unit.block_count
        if coming is None:
            owners = (one for unit in manifest.units for one in unit.tensors if not one.alias)
            coming = [Extent(entry, 0, entry.nbytes) for entry in owners]
        for extent in coming:
            for index, start, end in self._cut(*extent):
                self._missing[index] += end - start

    def write(self, entry: TensorEntry, first: int, nbytes: int, fill: Fill) -> None:
        """Lands bytes of a tensor, the first of which is its byte `first`."""
        self.begin()
        for index, begin, end in self._cut(entry, first, nbytes):
            into = self._arena.build(begin, end - begin)
            fill(into, begin - entry.offset - first)
            block = self._arena.manifest.block(index)
            whole = len(into) == block.nbytes
            if whole:  # while it is still in cache
                self._digests[index] = self._digest(into)
            self._arena.put(begin, end - begin)
            if self._count(index, end - begin):
                if not whole:
                    self._arena.flush()
                    self._digest_landed(block)
                self._settle(block)

    def begin(self) -> None:
        """Takes note that something is about to be written."""
        if self._update:
            self._update.begin()

    def written(self, name: str) -> None:
        """Takes note that torch has written a whole tensor."""
        self._arena.flush()
        entry = self._entries[name][0]
        for index, begin, end in self._cut(entry, 0, entry.nbytes):
            if self._count(index, end - begin):
                block = self._arena.manifest.block(index)
                self._digest_landed(block)
                self._settle(block)

    def manifest(self) -> Manifest:
        """Returns the manifest with digests, once everything has landed."""
        self._arena.flush()
        return self._arena.manifest.with_digests(self._digests)

    def _count(self, index: int, nbytes: int) -> bool:
        """Returns whether a block is complete now; gaps between tensors are, as zeros."""
        self._missing[index] -= nbytes
        return not self._missing[index]

    def _settle(self, block: Block) -> None:
        if self._update and self._digests[block.index] == self._update.serves.block_digest(
            block.index
        ):
            self._update.unchanged(block)

    def _digest_landed(self, block: Block) -> None:
        self._digests[block.index] = self._digest(self._arena.view(block.offset, block.nbytes))

    def _cut(self, entry: TensorEntry, first: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cuts bytes of a tensor at the ends of blocks: yields block, begin and end."""
        _, base, block = self._entries[entry.name]
        start, end = entry.offset + first, entry.offset + first + nbytes
        while start < end:
            number = (start - base) // BLOCK_BYTES
            border = min(base + (number + 1) * BLOCK_BYTES, end)
            yield block + number, start, border
            start = border
