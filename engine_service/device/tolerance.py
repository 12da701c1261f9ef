"""How far logits of the same weights may lie apart, relative to the largest one.

Batch size, thread count and the CPU's matrix units change the order of summation.
float32 rows were seen to differ by 3e-6; half precision by a few units in the last
place, 2^-11 (float16) and 2^-8 (bfloat16).
"""

from __future__ import annotations

import torch
from torch import Tensor

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def tolerance(dtype: torch.dtype) -> float:
    """Returns the tolerance for weights of a type."""
    return _TOLERANCES[dtype]


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Returns the largest difference over the largest expected magnitude.

    0 where both are all zero, infinite where only `expected` is; NaN passes through.
    """
    scale, difference = float(expected.abs().max()), float((expected - found).abs().max())
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / scale
