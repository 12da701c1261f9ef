"""Matrices that a checkpoint holds in float8, in blocks of 128 by 128 with a scale each.

The way of DeepSeek-V3: `X.weight` in float8_e4m3 beside `X.weight_scale_inv` in float32, which
is what to multiply a block with. A rank may hold a part of a matrix only, and fuse several:
their blocks are kept while they are those of the fused matrix too. Where a cut
or a seam doesn't fall between two blocks, the matrix is read as ordinary numbers.
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

    def plain(self) -> Tensor:
        """Returns what it stands for, float32 `[rows, columns]`."""
        (row, column), (rows, columns) = self.origin, self.values.shape
        lines = self.scales.repeat_interleave(BLOCK, 0)[row : row + rows]
        return self.values.float() * expanded(lines, column + columns)[:, column:]

    def grid(self) -> Tensor | None:
        """Returns the scales of its own blocks; None where its corner cuts through one."""
        if any(first % BLOCK for first in self.origin):
            return None
        (top, left), (rows, columns) = (n // BLOCK for n in self.origin), self.values.shape
        return self.scales[top:, left:][: -(-rows // BLOCK), : -(-columns // BLOCK)]


def expanded(scales: Tensor, columns: int) -> Tensor:
    """Repeats the scales of blocks side by side for every column: `[.., columns]`."""
    return scales.repeat_interleave(BLOCK, -1)[..., :columns]


def fused(parts: Sequence[Tensor | BlockScaled]) -> Tensor | BlockScaled:
    """Puts matrices of as many columns below one another; in blocks where it can."""
    scaled = [part for part in parts if isinstance(part, BlockScaled)]
    grids = [grid for part in scaled if (grid := part.grid()) is not None]
    seams = [len(part.values) % BLOCK for part in scaled[:-1]]
    if len(grids) == len(parts) and not any(seams):
        return BlockScaled(torch.cat([part.values for part in scaled]), torch.cat(grids))
    return torch.cat([as_plain(part) for part in parts])


def as_plain(matrix: Tensor | BlockScaled) -> Tensor:
    """Returns ordinary numbers."""
    return matrix.plain() if isinstance(matrix, BlockScaled) else matrix
