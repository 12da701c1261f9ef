"""Whole numbers of 8 bits: a scale per row of the matrix, and one per token of its input.

Both sides are rounded symmetrically, the largest magnitude of a row to 127, the input at
each product. oneDNN multiplies whole numbers and adds them up in 32 bits; what it reads is
packed for it (see `onednn`), and holds, behind the tiles, the sum of each row that it needs
to read signed input as unsigned.

Error: a product of normally distributed numbers is off by 0.8 % (64 columns) to 1.3 % (4096),
root mean square, as a part of the products. An outlier makes its own row, or token, coarser.
Input that is not finite gives NaN. Since a last bit of the input can decide which way a number is
rounded, two machines, or a layer before and after it was compiled, may differ by more than the
type of the model would let them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.device.formats import onednn
from engine_service.device.formats.operators import opaque

_onednn = torch.ops.onednn
_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def process(weight: Tensor, stored: Sequence[Tensor]) -> None:
    """Rounds and packs a matrix. See `Kernel`."""
    packed, scale = stored
    numbers, found = _rounded(weight)
    onednn.write(_onednn.qlinear_prepack(numbers, None), packed)
    scale.copy_(found.squeeze(1))


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, *stored)


@opaque("int8_product", stored=2)
def _product(hidden: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    tiles = _tiles(packed.data_ptr(), packed.shape[0], hidden.shape[-1])
    numbers, token_scale = _rounded(hidden)
    product: Tensor = _onednn.qlinear_pointwise.default(
        numbers, 1.0, 0, tiles, scale, torch.zeros(1, dtype=torch.int32), None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return product.mul_(token_scale).to(hidden.dtype)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whole numbers `[rows, columns]`, and float32 `[rows, 1]` to multiply them with."""
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
    return rows.div(scale).round_().to(torch.int8), scale


@functools.lru_cache(maxsize=1 << 16)
def _tiles(address: int, rows: int, columns: int) -> Tensor:
    return onednn.describe(address, (columns, rows), torch.int8, _order(rows, columns))


@functools.lru_cache(maxsize=256)
def _order(rows: int, columns: int) -> bytes:
    """Returns how oneDNN orders a matrix of this size on this machine."""
    empty = torch.empty(rows, columns, dtype=torch.int8)
    return onednn.description(_onednn.qlinear_prepack(empty, None))
