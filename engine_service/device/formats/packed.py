"""bfloat16 tiles in the order in which oneDNN's matrix product reads them.

oneDNN would repack a plain matrix in every product; see `onednn` for where the bytes lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.device.formats import onednn
from engine_service.device.formats.operators import leaf

_mkldnn = torch.ops.mkldnn


def process(weight: Tensor, stored: Sequence[Tensor]) -> None:
    """Packs a matrix. See `Kernel`."""
    onednn.write(_pack(weight.to(stored[0].dtype).contiguous()), stored[0])


def multiply(hidden: Tensor, matrix: Tensor) -> Tensor:
    """Multiplies `[tokens, columns]` by a matrix that is plain, or as `described` returns it."""
    product: Tensor = _mkldnn._linear_pointwise.default(hidden, matrix, None, "none", [], "")  # noqa: SLF001 - its only name
    return product


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, *stored)


def described(stored: Tensor, columns: int) -> Tensor:
    """Returns a matrix that reads what lies in an arena tensor, also what lands there later."""
    return _tiles(stored.data_ptr(), stored.shape[0], columns, stored.dtype)


@leaf(multiply)
def _product(hidden: Tensor, packed: Tensor) -> Tensor:
    return multiply(hidden, described(packed, hidden.shape[-1]))


@functools.lru_cache(maxsize=1 << 16)
def _tiles(address: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return onednn.describe(address, (rows, columns), dtype, _order(rows, columns, dtype))


@functools.lru_cache(maxsize=256)
def _order(rows: int, columns: int, dtype: torch.dtype) -> bytes:
    """Returns how oneDNN orders the tiles of a matrix of this size on this machine."""
    return onednn.description(_pack(torch.empty(rows, columns, dtype=dtype)))


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = _mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 - its only name
    return packed
