"""Takes pieces of checkpoint tensors, in any order and of any size, and fills an arena.

The one way in, whoever brings them. Bytes that the arena holds as they are go straight to
their place; those of a matrix that must be processed wait until it is complete, are processed
into the arena in place, and are freed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from torch import Tensor

from engine_service.core.covered import Covered
from engine_service.device.arena import Weights
from engine_service.device.assembly import Assembly
from engine_service.device.dtypes import SCALES_SUFFIX
from engine_service.device.fitting import check_filled, listed
from engine_service.device.formats import plain
from engine_service.device.formats.block_scaled import Matrix
from engine_service.device.formats.linear import Linear
from engine_service.device.landing import Digest, Extent, Fill, Landing, Update
from engine_service.device.parts import Part
from engine_service.device.places import Direct, Place, Waiting
from engine_service.device.torch_dtypes import bytes_of
from engine_service.device.waiting import WaitingRoom
from engine_service.errors import CheckpointError
from relay_service.core.digests import block_digest
from relay_service.core.manifest import Manifest, TensorEntry


class Collector:
    """One pass over an arena. Leaving its context lets go of what waits."""

    def __init__(
        self, arena: Weights, parts: Mapping[str, Part], processed: Mapping[str, Linear],
        *, most_bytes_waiting: int | None = None, digest: Digest = block_digest,
        update: Update | None = None,
    ) -> None:  # fmt: skip
        """Needs headers that were found to fit. Changes nothing yet.

        Raises `ArenaError` for a tensor that only a format can fill, where none is there to do it.

        Args:
            arena: Where to.
            parts: What this rank needs, by checkpoint tensor.
            processed: The matrices that a format fills, by each of their arena tensors.
            most_bytes_waiting: Of the checkpoint, that may wait in memory; what comes beyond
                them waits in a file. None for those of the largest layer.
            digest: Digests one block.
            update: What is there already; with it some tensors may stay away.
        """
        check_filled(arena.manifest, processed)
        self.parts = parts
        self.bytes_total = sum(part.nbytes for part in parts.values())
        self.bytes_landed = 0
        self.rounded_anew: list[TensorEntry] = []
        """Matrices whose float8 blocks could not be kept."""
        self._arena, self._processed = arena, processed
        self._partial = bool(update and update.partial)
        coming = list(self._coming()) if self._partial else None
        self._landing = Landing(arena, digest, coming, update)
        self._covered = {name: Covered(part.slice.elements) for name, part in parts.items()}
        self._places: dict[str, list[Place]] = {name: [] for name in parts}
        assemblies = [a for entry in self._filled() if (a := self._direct_or_assembly(entry))]
        if most_bytes_waiting is None:
            most_bytes_waiting = _largest_layer(assemblies)
        self.room = WaitingRoom(most_bytes_waiting)
        for assembly in assemblies:
            for name in assembly.parts:
                place = Waiting(assembly, name, self.room, self._process)
                self._places[name].append(place)

    @property
    def units(self) -> list[list[str]]:
        """Tensors that each unit needs, in the order in which its blocks fill up one by one."""
        found = []
        for unit in self._arena.manifest.units:
            names = [n for e in unit.tensors if e.logical for n in _parts_of(e)]
            pairs = [one for n in names for one in (n, n + SCALES_SUFFIX) if one in self.parts]
            found.append(list(dict.fromkeys(pairs)))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.room.close()

    def add(self, name: str, first: int, data: bytes | memoryview) -> None:
        """Takes a piece of a whole tensor, row by row, that begins with element `first`.

        What this rank doesn't hold of it is passed over. A piece that was refused with
        `ResourceExhausted` has changed nothing: it may come again.

        Raises:
            CheckpointError: Of a tensor that is not needed, beyond its end, or come twice.
            ResourceExhausted: It came before its turn, and the disk has no room for it.
        """
        if (part := self.parts.get(name)) is None:
            raise CheckpointError(f"unknown tensor: {name}", tensor=name)
        piece, itemsize = memoryview(data).cast("B"), part.dtype.itemsize
        elements = math.prod(part.slice.whole)
        if len(piece) % itemsize or not 0 <= first <= elements - len(piece) // itemsize:
            raise CheckpointError(
                f"{name} has {elements} elements of {itemsize} bytes: {len(piece)} bytes from "
                f"element {first} are no part of it",
                tensor=name,
            )
        for start, held in part.cut(first, piece):
            self.land(name, start, len(held) // itemsize, _copying(held))

    def land(self, name: str, first: int, count: int, fill: Fill) -> None:
        """Takes elements of what this rank holds of a tensor: has them written in their place.

        Raises what `add` does.
        """
        covered, places = self._covered[name], self._places[name]
        if covered.overlaps(first, first + count):
            raise CheckpointError(f"{name}: a part of it has come twice", tensor=name)
        for place in places:
            place.open()
        for place in places:
            place.write(first, count, fill)
        covered.add(first, first + count)
        self.bytes_landed += count * self.parts[name].dtype.itemsize
        if covered.complete:
            for place in places:
                place.complete()

    @property
    def bytes_to_write(self) -> int:
        """Bytes of the arena that will be written."""
        return sum(extent.nbytes for extent in self._coming())

    def finish(self, computed: Mapping[str, Tensor]) -> Manifest:
        """Adds what no checkpoint holds, by arena tensor; returns the manifest with digests.

        Where only some tensors come, the computed ones are there already.

        Raises `CheckpointError` naming the tensors that have not come, or not all of them.
        """
        lacking = {name: one.missing for name, one in self._covered.items() if not one.complete}
        if lacking:
            words = [f"{name} lacks {missing} elements" for name, missing in lacking.items()]
            raise CheckpointError(
                f"incomplete tensors: {listed(words)}", tensor=next(iter(lacking))
            )
        for entry in (one for unit in self._arena.manifest.units for one in unit.tensors):
            if not entry.logical and not entry.alias and not self._partial:
                fill = _copying(bytes_of(computed[entry.name].contiguous()))
                self._landing.write(entry, 0, entry.nbytes, fill)
        return self._landing.manifest()

    def _filled(self) -> list[TensorEntry]:
        """Returns the arena's tensors that are filled from a checkpoint, each by itself."""
        entries = (one for unit in self._arena.manifest.units for one in unit.tensors)
        return [
            one for one in entries
            if one.logical and not one.alias and not self.parts.keys().isdisjoint(_parts_of(one))
            and (one.name not in self._processed or one.name == self._processed[one.name].names[0])
        ]  # fmt: skip

    def _direct_or_assembly(self, entry: TensorEntry) -> Assembly | None:
        if self._assembled(entry):
            return Assembly(entry, self.parts)
        for name, before in _starts(entry):
            if part := self.parts.get(name):
                self._places[name].append(Direct(self._landing, entry, part.dtype, before))
        return None

    def _assembled(self, entry: TensorEntry) -> bool:
        scales = (name + SCALES_SUFFIX for name in _parts_of(entry))
        return entry.name in self._processed or any(name in self.parts for name in scales)

    def _coming(self) -> Iterator[Extent]:
        """Yields what will be written of each arena tensor."""
        for entry in (one for unit in self._arena.manifest.units for one in unit.tensors):
            if not entry.logical and not entry.alias and not self._partial:
                yield Extent(entry, 0, entry.nbytes)
            if not entry.logical or entry.alias or self.parts.keys().isdisjoint(_parts_of(entry)):
                continue
            if self._assembled(entry):
                yield Extent(entry, 0, entry.nbytes)
                continue
            itemsize = entry.dtype.itemsize
            for name, before in _starts(entry):
                if part := self.parts.get(name):
                    nbytes = part.slice.elements * itemsize
                    yield Extent(entry, before * itemsize, nbytes)

    def _process(self, assembly: Assembly, weight: Matrix) -> None:
        self._landing.begin()
        entry, matrix = assembly.entry, self._processed.get(assembly.entry.name)
        if matrix is None:
            plain.process(weight, [self._arena.tensors[entry.name]])
            self._landing.written(entry.name)
            return
        # Of a matrix whose rows are scaled, the columns of other ranks have come too.
        own = self.parts[entry.logical.split("+")[0]].slice.kept
        kept = matrix.fill(weight, own)
        if matrix.layout.quantised and assembly.scaled and not kept:
            self.rounded_anew.append(entry)
        for name in matrix.names:
            self._landing.written(name)


def _parts_of(entry: TensorEntry) -> list[str]:
    """Returns the checkpoint tensors that an arena tensor is made of."""
    return entry.logical.split("+")


def _starts(entry: TensorEntry) -> Iterator[tuple[str, int]]:
    """Yields the parts of a tensor that holds them as they are, and where each begins."""
    before = 0
    for part in entry.cut.parts:
        yield part.logical, before
        before += part.rows[1] * part.columns[1]


def _largest_layer(assemblies: list[Assembly]) -> int:
    """Returns the bytes that wait at most while a checkpoint comes layer by layer."""
    waiting: Counter[str] = Counter()
    for one in assemblies:
        waiting[".".join(one.entry.name.split(".")[:2])] += one.nbytes
    return max(waiting.values(), default=0)


def _copying(data: memoryview) -> Fill:
    def copy(into: memoryview, done: int) -> None:
        into[:] = data[done : done + len(into)]

    return copy
