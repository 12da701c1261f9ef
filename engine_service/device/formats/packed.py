"""bfloat16 tiles in the order in which oneDNN's matrix product reads them.

oneDNN would repack a plain matrix in every product; see `onednn` for where the bytes lie, and
`tiles` for how they are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.device.formats import onednn, order, processor
from engine_service.device.formats.bands import BAND_ROWS, bands
from engine_service.device.formats.block_scaled import Matrix
from engine_service.device.formats.operators import leaf
from engine_service.device.formats.tiles import Tiles

_mkldnn = torch.ops.mkldnn
_IN_BANDS = 3
"""Dimensions of a matrix in tiles."""


def process(weight: Matrix, stored: Sequence[Tensor], *, band_rows: int = BAND_ROWS) -> None:
    """Packs a matrix, so many rows at once. See `Kernel`."""
    (packed,) = stored
    if tiles := _declared(packed.dim()):
        for band in bands(len(weight), band_rows):
            order.pack(weight[band].to(packed.dtype), tiles, packed, band.start)
    else:
        onednn.write(_pack(weight[:].to(packed.dtype).contiguous()), packed)


def multiply(hidden: Tensor, matrix: Tensor) -> Tensor:
    """Multiplies `[tokens, columns]` by a matrix that is plain, or as `described` returns it."""
    product: Tensor = _mkldnn._linear_pointwise.default(hidden, matrix, None, "none", [], "")  # noqa: SLF001 - its only name
    return product


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, *stored)


def described(stored: Tensor, columns: int) -> Tensor:
    """Returns a matrix that reads what lies in an arena tensor, also what lands there later."""
    shape = onednn.rows_of(stored), columns
    return _tiles(stored.data_ptr(), shape, stored.dtype, stored.dim())


@leaf(multiply)
def _product(hidden: Tensor, packed: Tensor) -> Tensor:
    return multiply(hidden, described(packed, hidden.shape[-1]))


@functools.lru_cache(maxsize=1 << 16)
def _tiles(address: int, shape: tuple[int, int], dtype: torch.dtype, dimensions: int) -> Tensor:
    return onednn.describe(address, shape, dtype, _order(shape, dtype, dimensions))


@functools.lru_cache(maxsize=256)
def _order(shape: tuple[int, int], dtype: torch.dtype, dimensions: int) -> bytes:
    """Returns how oneDNN orders a matrix of this size on this machine.

    Raises `EngineError` where it isn't as it was declared.
    """
    found = onednn.description(_pack(torch.empty(shape, dtype=dtype)))
    if declared := _declared(dimensions):
        order.check(found, declared, shape)
    return found


def _declared(dimensions: int) -> Tiles | None:
    """Returns the tiles of an arena tensor; None for one in an order that oneDNN alone knows."""
    return processor.bf16_order() if dimensions == _IN_BANDS else None


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = _mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 - its only name
    return packed
