"""Where the ranks of sources and targets hold the parts of logical tensors. Plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from relay_service.core.cut import Part
from relay_service.core.manifest import Manifest, TensorEntry, Unit
from relay_service.core.rectangle import Rectangle
from relay_service.errors import FormatMismatch


class Holder(msgspec.Struct, frozen=True):
    """One rank's arena, and who holds it."""

    name: str
    """What errors call it: `seed rank 0`."""
    manifest: Manifest

    def tensors(self, unit: Unit) -> list[TensorEntry]:
        """Returns the tensors of a unit that have bytes of their own.

        Raises `FormatMismatch` where one doesn't say what it holds.
        """
        owners = [tensor for tensor in unit.tensors if not tensor.alias]
        for tensor in owners:
            if not tensor.cut.parts:
                raise FormatMismatch(
                    f"{self.name}: {tensor.name} does not say which rows and columns it holds",
                    field="placement", hint="start the target placed like a source",
                )  # fmt: skip
        return owners


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


def held_parts(tensor: TensorEntry) -> Iterator[Held]:
    """Yields where the parts of a tensor lie that isn't sealed."""
    row_bytes = (tensor.strides[0] if tensor.shape else 1) * tensor.dtype.itemsize
    offset = tensor.offset
    for part in tensor.cut.parts:
        yield Held(tensor, part, offset, row_bytes)
        offset += part.rows[1] * row_bytes
