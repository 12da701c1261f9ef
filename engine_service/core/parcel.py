"""Memory of its own for what nobody here holds: just those units, until ranks have taken them.

Plain Python. Laid out like an arena, so that a relay can fill it, a rank read a checkpoint
into it, and ranks take out of it what they would take out of each other's arenas.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from engine_service.core.recovery_plan import Missing
from relay_service.core.digests import block_digest
from relay_service.core.layout import check
from relay_service.core.manifest import UNIT_ALIGN, Manifest, Unit
from relay_service.memory.host import HostArena, create_memfd

NAME = "seedrelay-recovery"
"""What the memory is called, as the kernel shows it."""


class Parcel:
    """What is missing of one tensor-parallel part. Owns its memory."""

    def __init__(self, part: int, units: Sequence[Unit]) -> None:
        """Lays out units, of which each carries the digests that it must have."""
        self.part = part
        self.manifest = _packed(part, units)
        """Of what lies here once `missing` is empty."""
        self.missing = {unit.name: unit for unit in self.manifest.units}
        """By name: units whose bytes are not here yet, or not right."""
        self.fd = -1

    def allocate(self) -> None:
        """Makes the memory: not for an event loop. Raises `relay_service.errors.RelayError`."""
        self.fd = create_memfd(NAME, self.manifest.data_bytes)
        arena = HostArena(self.fd, self.manifest.data_bytes, writable=True, populate=False)
        arena.write_header("recovery")
        arena.close()

    def layout(self, names: Collection[str], rank: int) -> Manifest:
        """Describes the memory as if it held some units alone, without digests."""
        units = tuple(unit for unit in self.manifest.units if unit.name in names)
        return Manifest(rank, self.manifest.data_bytes, units).without_digests()

    def settle(self) -> list[Unit]:
        """Digests what was missing; returns what is right now, and no longer missing.

        Not for an event loop. Raises `relay_service.errors.RelayError`.
        """
        arena = HostArena(self.fd, self.manifest.data_bytes, writable=False)
        try:
            right = [unit for unit in self.missing.values() if _lies_in(arena, unit)]
        finally:
            arena.close()
        for unit in right:
            del self.missing[unit.name]
        return right

    def close(self) -> None:
        """Lets go of the memory; who mapped it keeps it. Doing so twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def parcels_of(missing: Iterable[Missing]) -> tuple[Parcel, ...]:
    """Returns a parcel for each part that misses something, in order, without memory yet."""
    parts: dict[int, list[Unit]] = {}
    for one in missing:
        parts.setdefault(one.part, []).append(one.unit)
    return tuple(Parcel(part, units) for part, units in sorted(parts.items()))


def _packed(rank: int, units: Sequence[Unit]) -> Manifest:
    """Lays units out one after another; each stays what it is, from its own start on."""
    placed, cursor = [], 0
    for unit in units:
        placed.append(_moved(unit, cursor - unit.offset))
        cursor += -(-unit.nbytes // UNIT_ALIGN) * UNIT_ALIGN
    manifest = Manifest(rank, cursor, tuple(placed))
    check(manifest)
    return manifest


def _moved(unit: Unit, by: int) -> Unit:
    """Moves a unit. What stands for a tensor of another one has no bytes here, and is left out."""
    own = {tensor.name for tensor in unit.tensors}
    tensors = tuple(
        msgspec.structs.replace(tensor, offset=tensor.offset + by)
        for tensor in unit.tensors
        if not tensor.alias or tensor.alias in own
    )
    return msgspec.structs.replace(unit, offset=unit.offset + by, tensors=tensors)


def _lies_in(arena: HostArena, unit: Unit) -> bool:
    return all(
        block_digest(arena.view(offset, nbytes)) == digest
        for (offset, nbytes), digest in zip(_blocks(unit), unit.digests, strict=True)
    )


def _blocks(unit: Unit) -> Iterator[tuple[int, int]]:
    """Yields offset and size of each block."""
    alone = Manifest(0, unit.offset + unit.nbytes, (unit,))
    for index in range(alone.block_count):
        block = alone.block(index)
        yield block.offset, block.nbytes
