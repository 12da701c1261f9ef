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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from relay_service.core.layout import MAX_DATA_BYTES, contiguous_strides
from relay_service.core.manifest import Manifest, TensorEntry, Unit
from relay_service.core.rectangle import Rectangle
from relay_service.errors import FormatMismatch, ManifestError


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

    parts: tuple[Part, ...]
    """Its rows, from top to bottom. Each part has all its columns."""
    sealed: str = ""
    """Why it cannot be cut otherwise (`packed in tiles`); empty where it can."""


class Holder(msgspec.Struct, frozen=True):
    """One rank's arena, and what its tensors are made of."""

    name: str
    """What errors call it: `seed rank 0`."""
    manifest: Manifest
    cuts: Mapping[str, Cut]
    """By name of the arena tensor; an alias needs none."""

    def tensors(self, unit: Unit) -> list[tuple[TensorEntry, Cut]]:
        """Returns the tensors of a unit that have bytes of their own, and their cuts.

        Raises `FormatMismatch` where it isn't said, `ManifestError` where it contradicts the
        tensor.
        """
        return [(tensor, self._cut(tensor)) for tensor in unit.tensors if not tensor.alias]

    def _cut(self, tensor: TensorEntry) -> Cut:
        if tensor.name not in self.cuts:
            raise FormatMismatch(
                f"{self.name}: {tensor.name} does not say which rows and columns it holds",
                field="placement", hint="start the target placed like a source",
            )  # fmt: skip
        cut = self.cuts[tensor.name]
        if fault := _fault(tensor, cut):
            raise ManifestError(f"{self.name}: {tensor.name}: {fault}")
        return cut


class Held(NamedTuple):
    """A part, and where an arena holds it."""

    tensor: TensorEntry
    part: Part
    offset: int
    """Of its first element, in bytes."""
    row_bytes: int
    """From one row to the next."""

    def at(self, piece: Rectangle) -> int:
        """Returns the offset of the first element of some of its rows and columns."""
        row, column = piece.top - self.part.rows[0], piece.left - self.part.columns[0]
        return self.offset + row * self.row_bytes + column * self.tensor.dtype.itemsize


def held_parts(tensor: TensorEntry, cut: Cut) -> Iterator[Held]:
    """Yields where the parts of a tensor lie that isn't sealed."""
    row_bytes = (tensor.strides[0] if tensor.shape else 1) * tensor.dtype.itemsize
    offset = tensor.offset
    for part in cut.parts:
        yield Held(tensor, part, offset, row_bytes)
        offset += part.rows[1] * row_bytes


def _fault(tensor: TensorEntry, cut: Cut) -> str:
    """Says how a cut contradicts its tensor; empty when it doesn't."""
    for part in cut.parts:
        if not _within(part):
            return f"{part.logical[:64]!r} has no rows {part.rows} and columns {part.columns}"
    if not cut.parts:
        return "it has no parts"
    return "" if cut.sealed else _shape_fault(tensor, cut)


def _shape_fault(tensor: TensorEntry, cut: Cut) -> str:
    """Says why the parts, one below another, aren't the tensor; empty when they are."""
    rows, columns = tensor.shape[0] if tensor.shape else 1, math.prod(tensor.shape[1:])
    if sum(part.rows[1] for part in cut.parts) != rows:
        return f"its parts are not its {rows} rows"
    if any(part.columns[1] != columns for part in cut.parts):
        return f"a part has not its {columns} columns"
    if not _has_whole_rows(tensor.shape, tensor.strides):
        return f"strides {tensor.strides} scatter its rows"
    return ""


def _within(part: Part) -> bool:
    spans = zip(part.whole, (part.rows, part.columns), strict=True)
    return all(
        0 <= size <= MAX_DATA_BYTES and first >= 0 and count >= 0 and first + count <= size
        for size, (first, count) in spans
    )


def _has_whole_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether the elements of a row lie side by side, and no two rows overlap."""
    if not shape:
        return True
    return tuple(strides[1:]) == contiguous_strides(shape)[1:] and (
        shape[0] == 1 or strides[0] >= math.prod(shape[1:])
    )
