"""Turns float32 arrays into the bytes of a checkpoint's dtype, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_ITEMS = 1 << 18
"""Values rounded at a time: they stay in the core's cache."""

_BFLOAT16_NAN = 0x7FC0


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds to the nearest bfloat16, a tie to the even one; every NaN becomes a quiet NaN.

    A bfloat16 is the upper half of a float32. Adding just under half of its last
    place, plus one where the last kept bit is set, carries exactly when rounding up is due.
    """
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    rounded = odd.astype(np.uint16)
    rounded[np.isnan(values)] = _BFLOAT16_NAN
    return rounded


def encode(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns `values`, flat, as an array whose bytes are those of `dtype`."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    match dtype:
        case "bfloat16":
            return round_to_bfloat16(flat)
        case "float16":
            return flat.astype("<f2")
        case _:
            return flat


def encode_in_chunks(values: NDArray[np.float32], dtype: str) -> Iterator[NDArray[Any]]:
    """Yields what `encode` returns in pieces, so that only a piece is held twice."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, CHUNK_ITEMS):
        yield encode(flat[start : start + CHUNK_ITEMS], dtype)
