"""Describes an arena: its tensors, units and blocks, and their digests.

Plain Python. Offsets are bytes relative to the start of the arena's data, which
begins `HEADER_BYTES` into the allocation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

import msgspec

from relay_service.core.cut import UNSAID, Cut
from relay_service.core.digests import root_digest
from relay_service.core.dtypes import DType

BLOCK_BYTES = 1 << 20
HEADER_BYTES = 4096
UNIT_ALIGN = 4096
TENSOR_ALIGN = 64
DIGEST_BYTES = 16


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor: where it lies and what it is."""

    name: str
    kind: str
    """`parameter`, `buffer`, `scale` or `derived`."""
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, as long as `shape`."""
    offset: int
    nbytes: int
    """From the first to the last element, both included."""
    logical: str = ""
    """Checkpoint tensors that it is made of, joined by `+`."""
    alias: str = ""
    """Name of the tensor whose bytes it shares; empty for an owner."""
    cut: Cut = UNSAID
    """Which parts of logical tensors it holds. An alias has none."""


class Unit(msgspec.Struct, frozen=True):
    """The smallest thing worth fetching by itself; contiguous in the arena."""

    name: str
    offset: int
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    digests: tuple[bytes, ...] = ()
    """XXH3-128 of each block; empty where the unit isn't verified."""

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return -(-self.nbytes // BLOCK_BYTES)

    @property
    def digest(self) -> bytes:
        """Root over the unit's size and block digests.

        It names neither the slot nor the rank, so an expert has one digest
        wherever it lies.
        """
        return root_digest("unit", [self.nbytes.to_bytes(8, "little"), *self.digests])


class Block(msgspec.Struct, frozen=True):
    """Unit of transfer and verification."""

    index: int
    """Flat index over all units of the arena."""
    offset: int
    nbytes: int
    unit: int
    """Index of its unit."""


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """Describes one rank's arena."""

    rank: int
    data_bytes: int
    units: tuple[Unit, ...]

    @cached_property
    def _first_blocks(self) -> list[int]:
        return [0, *accumulate(unit.block_count for unit in self.units)]

    @cached_property
    def _offsets(self) -> list[int]:
        return [unit.offset for unit in self.units]

    @property
    def block_count(self) -> int:
        """Number of blocks of the arena."""
        return self._first_blocks[-1]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all units: the data without the gaps between units."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def verified(self) -> bool:
        """Whether every unit carries its digests."""
        return all(len(unit.digests) == unit.block_count for unit in self.units)

    @property
    def digest(self) -> str:
        """Root over the unit names and digests, in hexadecimal; empty while incomplete."""
        if not self.verified:
            return ""
        parts = [part for unit in self.units for part in (unit.name.encode(), unit.digest)]
        return root_digest("rank", parts).hex()

    @cached_property
    def _blocks(self) -> list[Block]:
        blocks: list[Block] = []
        for number, unit in enumerate(self.units):
            for start in range(0, unit.nbytes, BLOCK_BYTES):
                size = min(BLOCK_BYTES, unit.nbytes - start)
                blocks.append(Block(len(blocks), unit.offset + start, size, number))
        return blocks

    @cached_property
    def _digests(self) -> list[bytes]:
        return [
            digest for unit in self.units for digest in unit.digests or (b"",) * unit.block_count
        ]

    def block(self, index: int) -> Block:
        """Returns the block with a flat index. Raises `IndexError` beyond the last one."""
        if index < 0:
            raise IndexError(index)
        return self._blocks[index]

    def blocks_at(self, offset: int, nbytes: int) -> range:
        """Returns the flat indexes of the blocks that bytes of one unit lie in."""
        number = bisect_right(self._offsets, offset) - 1
        start = offset - self._offsets[number]
        first = self._first_blocks[number]
        return range(first + start // BLOCK_BYTES, first + (start + nbytes - 1) // BLOCK_BYTES + 1)

    def block_digest(self, index: int) -> bytes:
        """Returns the expected digest of a block; empty where its unit isn't verified."""
        return self._digests[index]

    def tensor_at(self, index: int) -> str:
        """Names the first tensor that has bytes in a block."""
        block = self.block(index)
        unit, end = self.units[block.unit], block.offset + block.nbytes
        for tensor in unit.tensors:
            if tensor.offset < end and block.offset < tensor.offset + max(tensor.nbytes, 1):
                return tensor.name
        return unit.name

    def with_digests(self, digests: list[bytes]) -> Manifest:
        """Returns the same arena, verified: one digest per flat block index."""
        firsts = self._first_blocks
        units = tuple(
            msgspec.structs.replace(unit, digests=tuple(digests[first : first + unit.block_count]))
            for unit, first in zip(self.units, firsts, strict=False)
        )
        return Manifest(self.rank, self.data_bytes, units)

    def without_digests(self) -> Manifest:
        """Returns the same layout, unverified."""
        units = tuple(msgspec.structs.replace(unit, digests=()) for unit in self.units)
        return Manifest(self.rank, self.data_bytes, units)

    def renamed(self, units: Iterable[Unit]) -> Manifest:
        """Returns the same extents, where other units lie in the place of some."""
        by_offset = {unit.offset: unit for unit in units}
        replaced = tuple(by_offset.get(unit.offset, unit) for unit in self.units)
        return Manifest(self.rank, self.data_bytes, replaced)

    def extent_difference(self, target: Manifest) -> str:
        """Says like `layout_difference` where `target` lies otherwise, whatever it calls things."""
        if self._nameless().layout_difference(target._nameless()):
            return self.layout_difference(target)
        return ""

    def _nameless(self) -> Manifest:
        return Manifest(self.rank, self.data_bytes, tuple(map(_nameless, self.units)))

    def layout_difference(self, target: Manifest) -> str:
        """Says in words the first place where `target` lies otherwise; empty when it doesn't."""
        for seed, mine in zip(self.units, target.units, strict=False):
            if difference := _unit_difference(seed, mine):
                return difference
        if len(self.units) != len(target.units):
            return f"units: seed {len(self.units)}, target {len(target.units)}"
        if self.data_bytes != target.data_bytes:
            return f"data_bytes: seed {self.data_bytes}, target {target.data_bytes}"
        return ""


def weights_digest(manifests: list[Manifest]) -> str:
    """Root over all ranks, in hexadecimal; empty while one of them is incomplete."""
    roots = [manifest.digest for manifest in manifests]
    if not roots or not all(roots):
        return ""
    return root_digest("weights", [root.encode() for root in roots]).hex()


def _nameless(unit: Unit) -> Unit:
    tensors = tuple(
        msgspec.structs.replace(one, name="", logical="", cut=UNSAID) for one in unit.tensors
    )
    return msgspec.structs.replace(unit, name="", tensors=tensors)


def _unit_difference(seed: Unit, target: Unit) -> str:
    if seed.name != target.name:
        return f"unit: seed {seed.name}, target {target.name}"
    for mine, other in zip(seed.tensors, target.tensors, strict=False):
        if mine.name != other.name:
            return f"{seed.name}: seed has {mine.name} where target has {other.name}"
        if difference := _tensor_difference(mine, other):
            return f"{mine.name}: {difference}"
    if len(seed.tensors) != len(target.tensors):
        return f"{seed.name}: seed has {len(seed.tensors)} tensors, target {len(target.tensors)}"
    for field in ("offset", "nbytes"):
        if getattr(seed, field) != getattr(target, field):
            return f"{seed.name}: {field} {getattr(seed, field)} and {getattr(target, field)}"
    return ""


def _tensor_difference(seed: TensorEntry, target: TensorEntry) -> str:
    for field in ("kind", "dtype", "shape", "strides", "offset", "nbytes", "alias"):
        left, right = getattr(seed, field), getattr(target, field)
        if left != right:
            return f"{field} {left} and {right}"
    return seed.cut.difference(target.cut)
