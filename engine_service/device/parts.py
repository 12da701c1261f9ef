"""What a rank reads of one checkpoint tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine_service.device.checkpoint import StoredTensor
from engine_service.device.dtypes import SCALES_SUFFIX, stored_dtype
from engine_service.device.sharding import Slice
from engine_service.device.torch_dtypes import TORCH_DTYPES


class Part(NamedTuple):
    """A slice of a checkpoint tensor."""

    stored: StoredTensor
    slice: Slice
    scales: StoredTensor | None = None
    """Those of its blocks, read as a whole; None for a tensor that stands for itself."""

    @property
    def held(self) -> tuple[StoredTensor, ...]:
        """The tensors that it is read from."""
        return (self.stored, self.scales) if self.scales else (self.stored,)

    @property
    def slice_bytes(self) -> int:
        """Bytes of the slice."""
        return self.stored.nbytes // math.prod(self.slice.whole) * self.slice.elements

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.slice_bytes + (self.scales.nbytes if self.scales else 0)


def parts_of(stored: Mapping[str, StoredTensor], slices: Mapping[str, Slice]) -> dict[str, Part]:
    """Finds each slice's tensor by its name, and the scales beside it."""
    return {
        name: Part(stored[name], piece, stored.get(name + SCALES_SUFFIX))
        for name, piece in slices.items()
    }


def as_tensor(stored: StoredTensor, raw: bytearray, shape: tuple[int, ...]) -> Tensor:
    """Returns what was read of a tensor, on the same memory."""
    dtype = stored_dtype(stored.dtype)
    if dtype is None:
        raise ValueError(f"{stored.name} has dtype {stored.dtype}")
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[dtype]).view(shape)
