"""Copies runs of bytes that lie at equal distances, without a loop over them. numpy, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relay_service.core.copies import Copy


def scatter(block: bytes, data: memoryview, pieces: Sequence[Copy]) -> bool:
    """Copies runs of `block` into `data`; returns whether they are there. Releases the GIL.

    Raises `ValueError` or `TypeError` for runs that leave either of them.
    """
    equal = True
    for one in pieces:
        runs = _runs(block, one.source_offset, one.source_stride, one)
        landed = _runs(data, one.target_offset, one.target_stride, one)
        landed[...] = runs
        equal = equal and np.array_equal(landed, runs)
    return equal


def _runs(memory: bytes | memoryview, offset: int, stride: int, one: Copy) -> NDArray[np.uint8]:
    """Returns a view of runs, `[count, nbytes]`; numpy holds it within the memory."""
    shape, strides = (one.count, one.nbytes), (stride or one.nbytes, 1)
    return np.ndarray(shape, np.uint8, memory, offset, strides)
