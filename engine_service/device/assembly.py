"""Puts a matrix together from its checkpoint tensors: fused halves, numbers and their scales.

They lie one behind the other in one buffer, in the order of the matrix's rows, so that what
is complete needs no copy to be one matrix. Only a matrix that must be processed waits so.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine_service.device.dtypes import SCALES_SUFFIX
from engine_service.device.formats.block_scaled import BlockScaled, Matrix, Stacked
from engine_service.device.landing import Fill
from engine_service.device.parts import Part
from engine_service.device.torch_dtypes import TORCH_DTYPES
from engine_service.device.waiting import Buffer, WaitingRoom
from relay_service.core.manifest import TensorEntry

_ALIGN = 8
"""Bytes; every type may begin there."""


class Assembly:
    """One matrix of the arena, and what has come of its tensors."""

    def __init__(self, entry: TensorEntry, parts: Mapping[str, Part]) -> None:
        """`parts` are those of all tensors of the checkpoint."""
        self.entry = entry
        self._rows = entry.logical.split("+")
        scales = [name + SCALES_SUFFIX for name in self._rows if name + SCALES_SUFFIX in parts]
        self.parts = {name: parts[name] for name in (*self._rows, *scales)}
        """Those that it is made of, by checkpoint tensor."""
        self.scaled = bool(scales)
        """Whether it comes in float8 blocks, or a part of it."""
        self.nbytes = 0
        self._offsets: dict[str, int] = {}
        for name, part in self.parts.items():
            self._offsets[name] = self.nbytes
            self.nbytes += -(-part.nbytes // _ALIGN) * _ALIGN
        self._missing = set(self.parts)
        self._buffer: Buffer | None = None

    def open(self, room: WaitingRoom) -> None:
        """Makes room for all of it, once. Raises `ResourceExhausted`."""
        self._buffer = self._buffer or room.buffer(self.nbytes)

    def write(self, name: str, first: int, count: int, fill: Fill) -> None:
        """Takes elements of a tensor's slice; `open` comes first."""
        itemsize = self.parts[name].dtype.itemsize
        if self._buffer:
            self._buffer.write(self._offsets[name] + first * itemsize, count * itemsize, fill)

    def complete(self, name: str) -> Matrix | None:
        """Takes note that a tensor is complete; returns the matrix with the last of them."""
        self._missing.discard(name)
        if self._missing or self._buffer is None:
            return None
        held, self._buffer = self._buffer.take(), None
        return self._matrix(held)

    def _matrix(self, held: Tensor) -> Matrix:
        parts = [self.parts[name] for name in self._rows]
        seamless = all(part.nbytes % _ALIGN == 0 for part in parts[:-1])
        if not self.scaled and seamless and len({part.dtype for part in parts}) == 1:
            typed = held[: sum(part.nbytes for part in parts)].view(TORCH_DTYPES[parts[0].dtype])
            return typed.view(-1, *parts[0].slice.shape[1:])
        return Stacked([self._numbers(name, held) for name in self._rows])

    def _numbers(self, name: str, held: Tensor) -> Tensor | BlockScaled:
        rows, scales = self._tensor(name, held), name + SCALES_SUFFIX
        if scales not in self.parts:
            return rows
        cut = self.parts[name].slice
        return BlockScaled(rows, self._tensor(scales, held).float(), (cut.rows[0], cut.columns[0]))

    def _tensor(self, name: str, held: Tensor) -> Tensor:
        part, offset = self.parts[name], self._offsets[name]
        typed = held[offset : offset + part.nbytes].view(TORCH_DTYPES[part.dtype])
        return typed.view(part.slice.shape)
