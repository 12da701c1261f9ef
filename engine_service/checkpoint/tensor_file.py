"""Turns tensors into the bytes of a safetensors file, one piece at a time.

The `safetensors` package wants all tensors of a file in memory at once. Here each
tensor makes its bytes when its turn comes; the file is the same, byte for byte.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from engine_service.checkpoint.dtypes import HEADER_NAMES, ITEM_BYTES


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint that is yet to be written."""

    name: str
    """Name in the checkpoint, as Hugging Face has it."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[NDArray[Any]]]
    """Makes the values, encoded and flat, in order."""

    @property
    def nbytes(self) -> int:
        """Size of the values in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def file_header(tensors: Sequence[Tensor]) -> bytes:
    """Returns what stands before the values: the header's length and the header.

    It is padded so that the values lie aligned; they follow in the order of `tensors`.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": HEADER_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_values(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yields the values of all tensors, in pieces."""
    for tensor in tensors:
        for chunk in tensor.chunks():
            yield chunk.data.cast("B")
