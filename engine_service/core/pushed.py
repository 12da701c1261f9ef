"""What has come of pushed tensors: every byte once, and all of them. Plain Python."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from engine_service.core.update_messages import PushedHeader, StagePiece
from engine_service.errors import InvalidRequest

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of an element, by the names that safetensors gives."""
MAX_TENSORS = 1 << 20
MAX_BYTES = 1 << 50
_LISTED = 8


class Arrivals:
    """Keeps account of ranges, not of bytes: it takes no memory for what is in order."""

    def __init__(self, tensors: Sequence[PushedHeader]) -> None:
        """Raises `InvalidRequest` for tensors that cannot be, or stand twice."""
        if not tensors or len(tensors) > MAX_TENSORS:
            raise InvalidRequest(f"{len(tensors)} tensors cannot be pushed", field="tensors")
        self._tensors = tensors
        self._sizes = [_bytes_of(tensor) for tensor in tensors]
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest(f"{twice} stands twice", field="tensors", found=twice)
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in tensors]
        self.bytes_total = sum(self._sizes)
        """Bytes of all tensors."""

    def add(self, piece: StagePiece) -> None:
        """Books a piece. Raises `InvalidRequest` for one that cannot be, or overlaps another."""
        if not 0 <= piece.tensor < len(self._tensors):
            raise InvalidRequest(f"there is no tensor {piece.tensor}", field="piece.tensor")
        tensor, size = self._tensors[piece.tensor], self._sizes[piece.tensor]
        width, end = DTYPE_BYTES[tensor.dtype], piece.offset + len(piece.data)
        if piece.offset % width or end % width or not 0 <= piece.offset < end <= size:
            raise InvalidRequest(
                f"{tensor.name}: bytes {piece.offset} to {end} are no whole elements of its {size}",
                field="piece", tensor=tensor.name,
            )  # fmt: skip
        self._book(piece.tensor, piece.offset, end)

    def check_complete(self) -> None:
        """Raises `InvalidRequest` naming tensors of which something has not come."""
        missing = [
            f"{tensor.name} ({size - sum(end - begin for begin, end in ranges)} of {size} bytes)"
            for tensor, size, ranges in zip(self._tensors, self._sizes, self._ranges, strict=True)
            if sum(end - begin for begin, end in ranges) < size
        ]
        if missing:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise InvalidRequest(
                f"not all has come: missing are {', '.join(missing[:_LISTED])}{more}",
                field="piece",
            )

    def _book(self, number: int, begin: int, end: int) -> None:
        ranges = self._ranges[number]
        at = bisect.bisect(ranges, (begin, end))
        before = ranges[at - 1] if at else (-1, -1)
        after = ranges[at] if at < len(ranges) else (end + 1, end + 1)
        if before[1] > begin or after[0] < end:
            name = self._tensors[number].name
            raise InvalidRequest(f"{name}: bytes {begin} to {end} came twice", field="piece")
        first = at - 1 if before[1] == begin else at
        last = at + 1 if after[0] == end else at
        joined = [(begin, end), *ranges[first:last]]
        ranges[first:last] = [(min(one[0] for one in joined), max(one[1] for one in joined))]


def _bytes_of(tensor: PushedHeader) -> int:
    if tensor.dtype not in DTYPE_BYTES:
        raise InvalidRequest(
            f"{tensor.name}: type {tensor.dtype!r:.32} is unknown", field="tensors",
            expected=" | ".join(DTYPE_BYTES), found=tensor.dtype,
        )  # fmt: skip
    if any(size < 0 for size in tensor.shape) or len(tensor.digest) not in (0, 16):
        raise InvalidRequest(f"{tensor.name}: its shape or digest cannot be", field="tensors")
    size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    if not tensor.name or size > MAX_BYTES:
        raise InvalidRequest(f"{tensor.name!r}: {size} bytes cannot be", field="tensors")
    return size
