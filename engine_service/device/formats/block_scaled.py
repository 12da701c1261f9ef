"""Matrices that a checkpoint holds in float8, in blocks of 128 by 128 with a scale each.

The way of DeepSeek-V3: `X.weight` in float8_e4m3 beside `X.weight_scale_inv` in float32, which
is what to multiply a block with. A rank may hold a part of a matrix only, and fuse several:
their blocks are kept while they are those of the fused matrix too. Where a cut
or a seam doesn't fall between two blocks, the matrix is read as ordinary numbers, some rows at
a time: all of them at once would take several times the memory of what they are read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_service.device.formats.layouts import BLOCK


class BlockScaled(NamedTuple):
    """A matrix, or a part of one."""

    values: Tensor
    """float8_e4m3fn `[rows, columns]`."""
    scales: Tensor
    """float32, one per block of the whole matrix."""
    origin: tuple[int, int] = (0, 0)
    """Row and column of the whole matrix where the part begins."""

    def plain(self, rows: slice) -> Tensor:
        """Returns what some of its rows stand for, float32 `[rows, columns]`."""
        (row, column), columns = self.origin, self.values.shape[1]
        lines = self.scales[torch.arange(row + rows.start, row + rows.stop) // BLOCK]
        return self.values[rows].float() * expanded(lines, column + columns)[:, column:]

    def of_columns(self, first: int, count: int) -> BlockScaled:
        """Returns some of its columns."""
        row, column = self.origin
        return BlockScaled(self.values.narrow(1, first, count), self.scales, (row, column + first))

    def grid(self) -> Tensor | None:
        """Returns the scales of its own blocks; None where its corner cuts through one."""
        if any(first % BLOCK for first in self.origin):
            return None
        (top, left), (rows, columns) = (n // BLOCK for n in self.origin), self.values.shape
        return self.scales[top:, left:][: -(-rows // BLOCK), : -(-columns // BLOCK)]


class Stacked:
    """Matrices of as many columns below one another, put together when rows are read."""

    def __init__(self, parts: Sequence[Tensor | BlockScaled]) -> None:
        """Copies nothing; the types of the parts may differ."""
        held = [part.values if isinstance(part, BlockScaled) else part for part in parts]
        self._parts, self._heights = parts, [len(one) for one in held]
        self.shape: tuple[int, ...] = (sum(self._heights), *held[0].shape[1:])
        self.dtypes = {one.dtype for one in held}

    def __len__(self) -> int:
        """Returns the number of rows."""
        return sum(self._heights)

    def __getitem__(self, rows: slice) -> Tensor:
        """Returns rows as ordinary numbers; a copy only where they aren't those of one tensor."""
        (first, end, _), found = rows.indices(len(self)), []
        for part, height in zip(self._parts, self._heights, strict=True):
            own = slice(max(first, 0), min(end, height))
            if own.start < own.stop:
                found.append(part.plain(own) if isinstance(part, BlockScaled) else part[own])
            first, end = first - height, end - height
        return found[0] if len(found) == 1 else torch.cat(found)

    def of_columns(self, first: int, count: int) -> Stacked:
        """Returns some of its columns."""
        return Stacked([
            part.of_columns(first, count) if isinstance(part, BlockScaled)
            else part.narrow(1, first, count)
            for part in self._parts
        ])  # fmt: skip

    def blocks(self) -> list[BlockScaled]:
        """Returns its parts, if their blocks are its own too; none of them where they aren't."""
        found = [
            BlockScaled(part.values, grid)
            for part in self._parts
            if isinstance(part, BlockScaled) and (grid := part.grid()) is not None
        ]
        seams = any(height % BLOCK for height in self._heights[:-1])
        return found if len(found) == len(self._parts) and not seams else []


Matrix = Tensor | Stacked
"""Has a length and a shape; a slice of it are rows, as ordinary numbers."""


def expanded(scales: Tensor, columns: int) -> Tensor:
    """Repeats the scales of blocks side by side for every column: `[.., columns]`."""
    return scales.repeat_interleave(BLOCK, -1)[..., :columns]
