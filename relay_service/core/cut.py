"""What a rank holds of logical tensors: the coordinates from which weights are cut anew.

A logical tensor is one of the model, whole and before any rank took its part: a checkpoint's
matrix, a table that is computed, the scales of a matrix. It has rows, along its first
dimension, and columns, all others together. An arena tensor says of which parts of logical
tensors its own rows are made; so whoever fills it needs to know nothing of the model.

What means something else in another cut has no such coordinates: numbers in packed tiles, or
with a scale that is shared by just the elements that one rank holds. It is *sealed*, and
moves only to where it is cut the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from relay_service.core.rectangle import Rectangle

_MAX_ELEMENTS = 1 << 44


class Part(msgspec.Struct, frozen=True):
    """Some rows and columns of a logical tensor."""

    logical: str
    """Name of the logical tensor."""
    whole: tuple[int, int]
    """Rows and columns of the logical tensor."""
    rows: tuple[int, int]
    """First row and number of rows."""
    columns: tuple[int, int]
    """First column and number of columns; `(0, 1)` of one dimension."""

    @property
    def rectangle(self) -> Rectangle:
        """The rows and columns."""
        (top, rows), (left, columns) = self.rows, self.columns
        return Rectangle(top, top + rows, left, left + columns)

    def words(self, of: Rectangle | None = None) -> str:
        """Names the logical tensor and the rows and columns, or some of them; all inclusive."""
        top, bottom, left, right = of or self.rectangle
        said = f"{self.logical}: rows {top}..{bottom - 1} of {self.whole[0]}"
        if self.whole[1] == 1:
            return said
        return f"{said}, columns {left}..{right - 1} of {self.whole[1]}"


class Cut(msgspec.Struct, frozen=True):
    """What an arena tensor is made of."""

    parts: tuple[Part, ...] = ()
    """Its rows, from top to bottom. Each part has all its columns. Empty where it isn't said."""
    sealed: str = ""
    """Why it cannot be cut otherwise (`packed in tiles`); empty where it can."""

    def fault(self, shape: Sequence[int], strides: Sequence[int]) -> str:
        """Says how it contradicts its tensor; empty when it doesn't."""
        for part in self.parts:
            if not _within(part):
                return f"{part.logical[:64]!r} has no rows {part.rows} and columns {part.columns}"
        if not self.parts:
            return "it is sealed and has no parts" if self.sealed else ""
        return "" if self.sealed else _shape_fault(self, shape, strides)

    def difference(self, other: Cut) -> str:
        """Says in words what `other` holds instead; empty where it's the same, or not said."""
        if not self.parts or not other.parts or self == other:
            return ""
        if self.parts == other.parts:
            return f"sealed {self.sealed!r} and {other.sealed!r}"
        for mine, theirs in zip(self.parts, other.parts, strict=False):
            if mine != theirs:
                return f"{mine.words()} and {theirs.words()}"
        return f"{len(self.parts)} parts and {len(other.parts)}"


UNSAID = Cut()


def _shape_fault(cut: Cut, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Says why the parts, one below another, aren't the tensor; empty when they are."""
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    if sum(part.rows[1] for part in cut.parts) != rows:
        return f"its parts are not its {rows} rows"
    if any(part.columns[1] != columns for part in cut.parts):
        return f"a part has not its {columns} columns"
    if not _has_whole_rows(shape, strides):
        return f"strides {tuple(strides)} scatter its rows"
    return ""


def _within(part: Part) -> bool:
    spans = zip(part.whole, (part.rows, part.columns), strict=True)
    return all(
        0 <= size <= _MAX_ELEMENTS and first >= 0 and count >= 0 and first + count <= size
        for size, (first, count) in spans
    )


def _has_whole_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether the elements of a row lie side by side, and no two rows overlap."""
    if not shape:
        return True
    return tuple(strides[1:]) == _contiguous(shape) and (
        shape[0] == 1 or strides[0] >= math.prod(shape[1:])
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of all dimensions but the first where a row's elements lie in order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(1, len(shape)))
