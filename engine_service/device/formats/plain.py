"""The checkpoint's own bytes, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional


def process(weight: Tensor, stored: Sequence[Tensor]) -> None:
    """Copies a matrix. See `Kernel`."""
    stored[0].copy_(weight)


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return functional.linear(hidden, stored[0])
