"""The checkpoint's own bytes, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from engine_service.device.formats.bands import BAND_ROWS, bands
from engine_service.device.formats.block_scaled import Matrix


def process(weight: Matrix, stored: Sequence[Tensor], *, band_rows: int = BAND_ROWS) -> None:
    """Copies a matrix, so many rows at once. See `Kernel`."""
    for band in bands(len(weight), band_rows):
        stored[0][band] = weight[band]


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return functional.linear(hidden, stored[0])
