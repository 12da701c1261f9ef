"""Plans how a rank is filled from ranks that are cut otherwise. Plain Python, knows no model.

Whatever is equal moves whole: a unit with its digests (an expert that lies elsewhere), then
a tensor (a norm that all ranks hold). Of the rest each part is put together from
rectangles of logical tensors, the largest first, which are runs at equal distances in both
arenas. Bytes between tensors are zero in every arena, and between units belong to nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import msgspec

from relay_service.core.copies import Copy, merged
from relay_service.core.holder import Held, Holder, held_parts
from relay_service.core.manifest import TensorEntry, Unit
from relay_service.core.rectangle import Rectangle
from relay_service.errors import FormatMismatch, PartsMissing

MAX_STEPS = 1 << 23
"""Most comparisons of two parts for the ranks of one target: they take half a minute."""


class _Whole(msgspec.Struct, frozen=True):
    """A unit or tensor of a source, to be moved as it is."""

    source: int
    offset: int


class _Sourced(msgspec.Struct, frozen=True):
    """A part that a source holds."""

    source: int
    held: Held
    rectangle: Rectangle


class Planner:
    """Knows what sources hold, and spreads what targets need over them.

    One planner for all ranks of a target: of several sources that hold the same, the one
    gives that has given the least so far.
    """

    def __init__(self, sources: Sequence[Holder]) -> None:
        """Takes ranks of one or of several instances, of one format and with the same weights.

        Raises `FormatMismatch` or `ManifestError` for a source that doesn't say, or says
        wrongly, what it holds.
        """
        self._names = [source.name for source in sources]
        self._given = [0] * len(sources)
        self._steps_left = MAX_STEPS
        self._wholes: defaultdict[Hashable, list[_Whole]] = defaultdict(list)
        self._parts: defaultdict[str, list[_Sourced]] = defaultdict(list)
        self._sealed: dict[str, tuple[str, str]] = {}
        """By logical tensor: a sealed tensor that is made of it, and why it is sealed."""
        for number, source in enumerate(sources):
            for unit in source.manifest.units:
                self._learn(number, source, unit)

    def plan(self, target: Holder) -> tuple[Copy, ...]:
        """Returns what fills every byte of the target's tensors once, in order of the target.

        Raises `PartsMissing` with everything that no source holds, `FormatMismatch` for what
        cannot be cut as the target needs it, or is of another dtype or shape there, or in
        pieces too many to look through; `ManifestError` for a target that contradicts itself.
        """
        copies: list[Copy] = []
        missing: list[str] = []
        for unit in target.manifest.units:
            copies += self._fill_unit(target, unit, missing)
        if missing:
            raise PartsMissing(missing)
        return tuple(copies)

    def _learn(self, number: int, source: Holder, unit: Unit) -> None:
        tensors = source.tensors(unit)
        self._wholes[_unit_key(unit, tensors)].append(_Whole(number, unit.offset))
        for tensor in tensors:
            self._wholes[_tensor_key(tensor)].append(_Whole(number, tensor.offset))
            if tensor.cut.sealed:
                reason = tensor.name, tensor.cut.sealed
                self._sealed.update((part.logical, reason) for part in tensor.cut.parts)
                continue
            for held in held_parts(tensor):
                self._parts[held.part.logical].append(_Sourced(number, held, held.part.rectangle))

    def _fill_unit(self, target: Holder, unit: Unit, missing: list[str]) -> list[Copy]:
        if not unit.nbytes:
            return []
        tensors = target.tensors(unit)
        if whole := self._whole(_unit_key(unit, tensors), unit.nbytes):
            return [Copy(whole.source, whole.offset, unit.offset, unit.nbytes, unit=unit.name)]
        return merged(copy for tensor in tensors for copy in self._fill_tensor(tensor, missing))

    def _fill_tensor(self, tensor: TensorEntry, missing: list[str]) -> Iterator[Copy]:
        if not tensor.nbytes:
            return
        if whole := self._whole(_tensor_key(tensor), tensor.nbytes):
            yield Copy(whole.source, whole.offset, tensor.offset, tensor.nbytes)
            return
        if tensor.cut.sealed:
            self._refuse_sealed(tensor, missing)
            return
        for held in held_parts(tensor):
            yield from self._fill_part(held, missing)

    def _whole(self, key: Hashable, nbytes: int) -> _Whole | None:
        """Returns the equal of a unit or tensor that has given least; None where none is."""
        found = min(
            self._wholes.get(key, ()), key=lambda one: self._given[one.source], default=None
        )
        if found:
            self._given[found.source] += nbytes
        return found

    def _fill_part(self, want: Held, missing: list[str]) -> Iterator[Copy]:
        """Takes the largest rectangle that a source holds, then the largest of the rest."""
        rest = [one for one in (want.part.rectangle,) if one.area]
        known = self._parts.get(want.part.logical, ())
        self._count_steps(want, len(known))
        areas = [(_area(rest, one), one) for one in known if self._fits(want, one)]
        while rest and (areas := [held for held in areas if held[0]]):
            self._count_steps(want, len(areas))
            _, best = max(areas, key=lambda held: (held[0], -self._given[held[1].source]))
            for piece in _pieces(rest, best):
                yield self._copy(want, best, piece)
            taken = best.rectangle
            rest = [left for one in rest for left in one.without(taken)]
            areas = [
                (_area(rest, one) if one.rectangle.shared(taken).area else area, one)
                for area, one in areas
            ]
        if rest and want.part.logical in self._sealed:
            raise _cannot_be_cut(want.tensor, *self._sealed[want.part.logical])
        missing += [f"{want.tensor.name}: {want.part.words(piece)}" for piece in rest]

    def _count_steps(self, want: Held, steps: int) -> None:
        """Bounds what a source can make us do by holding a tensor in a great many pieces."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise FormatMismatch(
                f"{want.tensor.name}: the sources hold {want.part.logical} in too many pieces",
                field="placement", hint="start the target placed like a source",
            )  # fmt: skip

    def _fits(self, want: Held, one: _Sourced) -> bool:
        """Returns True, or raises `FormatMismatch` where the logical tensor is another."""
        have = one.held
        for what, mine, theirs in (
            ("dtype", have.tensor.dtype, want.tensor.dtype),
            ("whole shape", have.part.whole, want.part.whole),
        ):
            if mine != theirs:
                raise FormatMismatch(
                    f"{want.tensor.name}: {what} of {want.part.logical}: "
                    f"{self._names[one.source]} {mine}, target {theirs}",
                    field=what, expected=str(theirs), found=str(mine),
                    hint="start the target like the seed, or name another source",
                )  # fmt: skip
        return True

    def _copy(self, want: Held, one: _Sourced, piece: Rectangle) -> Copy:
        nbytes = (piece.right - piece.left) * want.tensor.dtype.itemsize
        count = piece.bottom - piece.top
        self._given[one.source] += nbytes * count
        return Copy(
            one.source, one.held.at(piece), want.at(piece), nbytes,
            count, one.held.row_bytes, want.row_bytes,
        )  # fmt: skip

    def _refuse_sealed(self, tensor: TensorEntry, missing: list[str]) -> None:
        """Raises where sources hold it cut otherwise; else it is missing."""
        if any(
            part.logical in self._sealed or part.logical in self._parts for part in tensor.cut.parts
        ):
            raise _cannot_be_cut(tensor, tensor.name, tensor.cut.sealed)
        missing += [f"{tensor.name}: {part.words()}" for part in tensor.cut.parts]


def _cannot_be_cut(tensor: TensorEntry, sealed: str, reason: str) -> FormatMismatch:
    return FormatMismatch(
        f"{tensor.name}: no source holds it cut like the target, and {sealed} cannot be cut "
        f"anew: it is {reason}",
        field="placement",
        hint="start the target placed like a source, or both in a format that can be cut",
    )


def _pieces(rest: Iterable[Rectangle], one: _Sourced) -> Iterator[Rectangle]:
    """Yields what a source holds of what is still wanted."""
    shared = (piece.shared(one.rectangle) for piece in rest)
    return (piece for piece in shared if piece.area)


def _area(rest: Iterable[Rectangle], one: _Sourced) -> int:
    return sum(piece.area for piece in _pieces(rest, one))


def _unit_key(unit: Unit, tensors: list[TensorEntry]) -> Hashable:
    """Equal for units of equal bytes, wherever they lie."""
    held = [(one.offset - unit.offset, *_tensor_key(one)) for one in tensors]
    return unit.name, unit.nbytes, *held


def _tensor_key(tensor: TensorEntry) -> tuple[Hashable, ...]:
    """Equal for tensors of equal bytes, wherever they lie."""
    return tensor.dtype, tensor.shape, tensor.strides, tensor.cut
