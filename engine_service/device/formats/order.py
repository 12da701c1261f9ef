"""The order of a packed matrix: oneDNN's description of it, held against the one declared here.

The arena is laid out, and matrices are packed, in the order that `tiles` declares; what
multiplies is told by oneDNN's own description of a matrix of that size. So the two must be
the same, and where they aren't, nothing is served. The description is the record of
`dnnl_memory_desc` in oneDNN 3 (src/common/memory_desc.hpp), as torch hands it out.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from engine_service.device.formats.tiles import Tiles
from engine_service.errors import EngineError

_DIMENSIONS = ctypes.c_int64 * 12
_BLOCKED = 2


class _Description(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int32),
        ("ndims", ctypes.c_int32),
        ("dims", _DIMENSIONS),
        ("data_type", ctypes.c_int32),
        ("padded_dims", _DIMENSIONS),
        ("padded_offsets", _DIMENSIONS),
        ("offset0", ctypes.c_int64),
        ("format_kind", ctypes.c_int32),
        ("strides", _DIMENSIONS),
        ("inner_nblks", ctypes.c_int32),
        ("inner_blks", _DIMENSIONS),
        ("inner_idxs", _DIMENSIONS),
        ("other_formats", ctypes.c_uint8 * 24),
        ("extra_flags", ctypes.c_uint64),
        ("extra_masks", ctypes.c_int32 * 6),
    )


def pack(weight: Tensor, tiles: Tiles, stored: Tensor, first: int = 0) -> None:
    """Writes a matrix `[rows, columns]` in tiles into an arena tensor, in place.

    It may be some rows of a larger one, from row `first`, where a tile begins. A group of
    columns must be 4 bytes. Elements behind the last tile stay as they are.
    """
    rows, columns = weight.shape
    padding = (0, -columns % tiles.columns, 0, -rows % tiles.rows)
    padded = functional.pad(weight, padding) if any(padding) else weight.contiguous()
    groups = padded.view(torch.int32).view(-1, tiles.rows, padded.shape[1] // tiles.group)
    held = stored.view(-1)[first * padded.shape[1] :][: padded.numel()].view(torch.int32)
    held.view(len(groups), -1, tiles.rows).copy_(groups.transpose(1, 2))


def check(order: bytes, tiles: Tiles, shape: tuple[int, int], *, transposed: bool = False) -> None:
    """Raises `EngineError` when oneDNN describes another order for a matrix `[rows, columns]`.

    `transposed` when the description is of `[columns, rows]`.
    """
    found, row, column = _Description.from_buffer_copy(order), int(transposed), int(not transposed)
    bands, padded = -(-shape[0] // tiles.rows), tiles.shape(*shape)[2]
    expected = (
        (2, _BLOCKED, 0, *shape),
        (bands * tiles.rows, padded),
        (tiles.rows * padded, tiles.rows * tiles.columns),
        (tiles.columns // tiles.group, tiles.rows, tiles.group),
        (column, row, column),
    )
    described = (
        (found.ndims, found.format_kind, found.offset0, found.dims[row], found.dims[column]),
        (found.padded_dims[row], found.padded_dims[column]),
        (found.strides[row], found.strides[column]),
        tuple(found.inner_blks[: found.inner_nblks]),
        tuple(found.inner_idxs[: found.inner_nblks]),
    )
    if described != expected:
        raise EngineError(
            f"oneDNN orders a matrix {list(shape)} as {described} on this processor, not in "
            f"{tiles.words} {expected}: start with --weight-format plain"
        )


def without_sums(order: bytes) -> bytes:
    """Returns a description that says that nothing follows the tiles.

    oneDNN puts the sum of each row behind whole numbers, for input with a zero point.
    """
    found = _Description.from_buffer_copy(order)
    found.extra_flags = 0
    found.extra_masks[:] = [0] * len(found.extra_masks)
    return bytes(found) + order[ctypes.sizeof(found) :]
