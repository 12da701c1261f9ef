"""Whole numbers of 8 bits: a scale per row of the matrix, and one per token of its input.

Both sides are rounded symmetrically, the largest magnitude of a row to 127, the input at
each product. oneDNN multiplies whole numbers and adds them up in 32 bits; what it reads is
packed for it (see `onednn`). The scale is that of the whole row, however few of its columns
a rank holds, so that all ranks, and any number of them, hold the same numbers.

Where ranks hold some columns each, all round by the largest number of the whole row: so results do
not depend on how many ranks there are.

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

from engine_service.device.formats import onednn, order
from engine_service.device.formats.bands import BAND_ROWS, bands
from engine_service.device.formats.block_scaled import Matrix
from engine_service.device.formats.operators import opaque
from engine_service.device.formats.processor import INT8_ORDER

_onednn = torch.ops.onednn
_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def process(
    weight: Matrix, stored: Sequence[Tensor], whole: Matrix | None = None,
    *, band_rows: int = BAND_ROWS,
) -> None:  # fmt: skip
    """Rounds and packs a matrix, so many rows at once. See `Kernel`.

    `whole` has all columns of the rows of which `weight` has some; None where those are all.
    """
    packed, held = stored
    for band in bands(len(weight), band_rows):
        numbers = weight[band].float()
        scale = _scale(largest(numbers if whole is None else whole[band]))
        rounded = numbers.div(scale).round_().to(torch.int8)
        order.pack(rounded, INT8_ORDER, packed, band.start)
        held[band] = scale.squeeze(1)


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, *stored)


def forward_part(hidden: Tensor, most: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies some columns, of which others lie elsewhere; `most` is the `largest` of all."""
    return _product_of_part(hidden, *stored, most)


def largest(rows: Tensor) -> Tensor:
    """Returns the largest magnitude of each row, float32 `[rows, 1]`, by which it is rounded."""
    return rows.float().abs().amax(1, keepdim=True)


@opaque("int8_product", stored=2)
def _product(hidden: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return _multiplied(hidden, packed, scale, largest(hidden))


@opaque("int8_product_of_part", stored=3)
def _product_of_part(hidden: Tensor, packed: Tensor, scale: Tensor, most: Tensor) -> Tensor:
    return _multiplied(hidden, packed, scale, most)


def _multiplied(hidden: Tensor, packed: Tensor, scale: Tensor, most: Tensor) -> Tensor:
    tiles, token_scale = _tiles(packed.data_ptr(), len(scale), hidden.shape[-1]), _scale(most)
    numbers = hidden.float().div(token_scale).round_().to(torch.int8)
    product: Tensor = _onednn.qlinear_pointwise.default(
        numbers, 1.0, 0, tiles, scale, torch.zeros(1, dtype=torch.int32), None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return product.mul_(token_scale).to(hidden.dtype)


def _scale(most: Tensor) -> Tensor:
    return most.div(_LARGEST).clamp_(min=_SMALLEST_SCALE)


@functools.lru_cache(maxsize=1 << 16)
def _tiles(address: int, rows: int, columns: int) -> Tensor:
    return onednn.describe(address, (columns, rows), torch.int8, _order(rows, columns))


@functools.lru_cache(maxsize=256)
def _order(rows: int, columns: int) -> bytes:
    """Returns the order of a matrix, which oneDNN chooses so for one thread.

    For several it takes smaller tiles for small matrices. Raises `EngineError` where it
    isn't as it was declared.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        empty = torch.empty(rows, columns, dtype=torch.int8)
        found = onednn.description(_onednn.qlinear_prepack(empty, None))
    finally:
        torch.set_num_threads(threads)
    order.check(found, INT8_ORDER, (rows, columns), transposed=True)
    return order.without_sums(found)
