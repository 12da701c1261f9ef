"""Takes units out of memory that another rank has filled, or a relay. Free of torch.

A fresh rank takes them into its arena; one that serves keeps them beside it, until it follows
a new map. What counts is the digest of what has landed here, where nobody else writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine_service.core.member_messages import Taken, TakeUnits, Wanted
from engine_service.errors import ArenaError, ResourceExhausted, WrongState
from relay_service.core.buffers import address_of
from relay_service.core.digests import block_digest
from relay_service.core.layout import check
from relay_service.core.manifest import BLOCK_BYTES, Manifest, Unit
from relay_service.memory.host import HostArena, available_bytes, is_sealed

if TYPE_CHECKING:
    from engine_service.device.arena import Arena
    from engine_service.device.plan import Plan

Progress = Callable[[int, int], None]


class Memory(Protocol):
    """The memory of the arena that takes."""

    @property
    def sequence(self) -> int:
        """Another number after each change of what lies there."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns writable bytes of the data."""


class _Kept(NamedTuple):
    """What a unit's place shall hold."""

    unit: str
    data: memoryview
    sequence: int
    """Of the arena when it was taken."""


class _Pair(NamedTuple):
    """A unit where it lies, and where it goes to."""

    wanted: Wanted
    source: Unit
    target: Unit
    room: memoryview


class TakenUnits:
    """What one rank has taken."""

    def __init__(self) -> None:
        self.landed: set[str] = set()
        """Units of a fresh arena that hold what they should."""
        self._kept: dict[int, _Kept] = {}

    def take(
        self, fd: int, command: TakeUnits, own: Manifest, memory: Memory,
        *, sealed: bool, progress: Progress,
    ) -> Taken:  # fmt: skip
        """Copies what is wanted out of the memory behind `fd`.

        Args:
            fd: Stays the caller's.
            command: What to take.
            own: Of the arena that takes, as it is called now.
            memory: Of that arena.
            sealed: Whether it serves.
            progress: Called with bytes taken so far and in all.

        Raises:
            ArenaError: A unit isn't there, has no place here or has other bytes. None is kept.
            ResourceExhausted: No memory to keep them in.
            ManifestError: The memory is none of the manifest (of `relay_service.errors`).
        """
        check(command.manifest)
        source = HostArena(fd, command.manifest.data_bytes, writable=False, populate=False)
        try:
            source.check_header()
            pairs = _paired(command, own, _kept_beside(command, own) if sealed else memory.view)
            try:
                _copy(pairs, source, progress)
            except BaseException:
                if not sealed:
                    _clear(pairs)
                    self.landed -= {pair.target.name for pair in pairs}
                raise
        finally:
            source.close()
        for pair in pairs:
            if sealed:
                kept = _Kept(pair.wanted.unit, pair.room, memory.sequence)
                self._kept[pair.target.offset] = kept
            else:
                self.landed.add(pair.target.name)
        return Taken(sum(pair.target.nbytes for pair in pairs))

    def of(self, place: Unit, unit: str, sequence: int) -> memoryview | None:
        """Returns what a place shall hold to become `unit`; None where it was not taken.

        What was taken before the arena changed counts for nothing.
        """
        kept = self._kept.get(place.offset)
        return kept.data if kept and (kept.unit, kept.sequence) == (unit, sequence) else None

    def drop(self) -> None:
        """Forgets what is kept beside the arena."""
        self._kept.clear()


def take_units(
    planned: Plan, arena: Arena | None, fd: int, command: TakeUnits, progress: Progress
) -> Taken:
    """Takes units for a rank, whose arena has a mapping alone until torch is there.

    Raises what `TakenUnits.take` does, and `WrongState` for a rank on a device.
    """
    if planned.memory is None:
        raise WrongState("units are taken into host memory only")
    manifest, memory = planned.manifest, planned.memory
    if arena is not None:
        return planned.taken.take(
            fd, command, arena.manifest, arena, sealed=arena.sealed, progress=progress
        )
    return planned.taken.take(
        fd, command, manifest, memory.mapping, sealed=is_sealed(memory.fd), progress=progress
    )


def _kept_beside(command: TakeUnits, own: Manifest) -> Callable[[int, int], memoryview]:
    """Returns what gives memory of its own to each unit."""
    sizes = {unit.name: unit.nbytes for unit in own.units}
    total, available = sum(sizes.get(one.at, 0) for one in command.wanted), available_bytes()
    if total > available:
        raise ResourceExhausted(
            f"no memory to take {total} bytes beside the arena: {available} are available"
        )
    return lambda _offset, nbytes: memoryview(bytearray(nbytes))


def _paired(
    command: TakeUnits, own: Manifest, room: Callable[[int, int], memoryview]
) -> Sequence[_Pair]:
    there = {unit.name: unit for unit in command.manifest.units}
    here = {unit.name: unit for unit in own.units}
    pairs = []
    for wanted in command.wanted:
        source, target = there.get(wanted.unit), here.get(wanted.at)
        if source is None or target is None:
            missing = f"{wanted.at} is no unit of this rank" if source else "it isn't there"
            raise _wrong(wanted, missing)
        if (source.nbytes, len(wanted.digests)) != (target.nbytes, target.block_count):
            raise _wrong(
                wanted,
                f"{source.nbytes} bytes and {len(wanted.digests)} digests do not fill the "
                f"{target.nbytes} bytes of {wanted.at}",
            )
        pairs.append(_Pair(wanted, source, target, room(target.offset, target.nbytes)))
    return pairs


def _copy(pairs: Sequence[_Pair], source: HostArena, progress: Progress) -> None:
    done, total = 0, sum(pair.target.nbytes for pair in pairs)
    for wanted, there, _here, room in pairs:
        for index, start in enumerate(range(0, there.nbytes, BLOCK_BYTES)):
            landed = room[start : start + BLOCK_BYTES]
            data = source.view(there.offset + start, len(landed))
            ctypes.memmove(address_of(landed), address_of(data), len(landed))
            if block_digest(landed) != wanted.digests[index]:
                raise _wrong(wanted, f"block {index} has other bytes than it should have")
            done += len(landed)
            progress(done, total)


def _clear(pairs: Sequence[_Pair]) -> None:
    """What did not land whole is zero, as before."""
    for pair in pairs:
        ctypes.memset(address_of(pair.room), 0, len(pair.room))


def _wrong(wanted: Wanted, why: str) -> ArenaError:
    return ArenaError(f"cannot take {wanted.unit}: {why}", unit=wanted.unit)
