"""Whole numbers of 4 bits, two in a byte: a scale and a zero for each group of a row's columns.

A group runs from its lowest number to its highest in 15 steps; it is the largest power of two
up to 128 that divides the columns, which are padded to a multiple of 32, as the rows are to
one of 16. Scale and zero are held in the type of the model, which torch's product for
CPUs wants, and the numbers in the order in which it reads them. The input stays as it is.
Groups begin at a rank's own first column, so that those of a cut matrix are whole.

Error: a product of normally distributed numbers is off by 9 % (groups of 64) to 10 % (of 128),
root mean square, as a part of the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine_service.device.formats.bands import BAND_ROWS, bands
from engine_service.device.formats.block_scaled import Matrix
from engine_service.device.formats.layouts import INT4_COLUMNS
from engine_service.device.formats.operators import opaque

_aten = torch.ops.aten
_STEPS = 15
_MIDDLE = 8
"""The number that stands for a group's zero."""


def process(weight: Matrix, stored: Sequence[Tensor], *, band_rows: int = BAND_ROWS) -> None:
    """Rounds and packs a matrix, so many rows at once. See `Kernel`."""
    packed, scales = stored
    groups, rows, _ = scales.shape
    columns = _padded(weight.shape[1])
    bytes_of_rows = packed.view(-1)[: rows * columns // 2].view(rows, -1)
    for band in bands(rows, band_rows):
        held = weight[band]
        padding = (0, columns - held.shape[1], 0, band.stop - band.start - len(held))
        grouped = functional.pad(held.float(), padding).view(-1, groups, columns // groups)
        numbers, scales_of_groups = _rounded(grouped, scales.dtype)
        found = _aten._convert_weight_to_int4pack_for_cpu(numbers.view(-1, columns), 1)  # noqa: SLF001 - its only name
        bytes_of_rows[band] = found.view(-1, columns // 2)
        scales[:, band] = scales_of_groups.transpose(0, 1)


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, *stored)


@opaque("int4_product", stored=2)
def _product(hidden: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    groups, rows, _ = scales.shape
    columns = _padded(hidden.shape[1])
    numbers = packed.view(-1)[: rows * columns // 2].view(rows, columns // 2)
    padded = functional.pad(hidden, (0, columns - hidden.shape[1])).contiguous()
    product: Tensor = _aten._weight_int4pack_mm_for_cpu(padded, numbers, columns // groups, scales)  # noqa: SLF001 - its only name
    return product[:, : packed.shape[0]]


def _rounded(grouped: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns whole numbers for float32 `[rows, groups, columns of one]`; `[rows, groups, 2]`."""
    low, high = grouped.aminmax(dim=2)
    scale = ((high - low) / _STEPS).to(dtype)
    zero = (low + _MIDDLE * scale.float()).to(dtype)
    steps = (grouped - zero.float().unsqueeze(2)).div_(scale.float().unsqueeze(2))
    # A group of equal numbers has no steps; one that is not finite is told by its scale.
    numbers = steps.nan_to_num_(0.0).round_().add_(_MIDDLE).clamp_(0, _STEPS).int()
    return numbers, torch.stack((scale, zero), 2)


def _padded(columns: int) -> int:
    return -(-columns // INT4_COLUMNS) * INT4_COLUMNS
