"""Copies runs of bytes that lie at equal distances, without a loop over them. numpy, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay_service.core.copies import Copy

_WORD_BYTES = 8


def scatter(block: memoryview | bytes, data: memoryview, pieces: Sequence[Copy]) -> bool:
    """Copies runs of `block` into `data`; returns whether they are there. Releases the GIL.

    Raises `ValueError` or `TypeError` for runs that leave either of them.
    """
    equal = True
    for one in pieces:
        source, target = _views(block, data, one)
        target[...] = source
        equal = equal and bool((target == source).all())
    return equal


def _views(
    block: memoryview | bytes, data: memoryview, one: Copy
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns runs `[count, elements]` of both sides; numpy keeps them within the memory.

    Their elements are words where all sizes allow it: there are fewer to compare.
    """
    sizes = one.nbytes, one.source_offset, one.target_offset, one.source_stride, one.target_stride
    words = not any(size % _WORD_BYTES for size in sizes)
    kind, width = (np.uint64, _WORD_BYTES) if words else (np.uint8, 1)
    shape = one.count, one.nbytes // width
    rows = one.source_stride or one.nbytes, one.target_stride or one.nbytes
    return (
        np.ndarray(shape, kind, block, one.source_offset, (rows[0], width)),
        np.ndarray(shape, kind, data, one.target_offset, (rows[1], width)),
    )
