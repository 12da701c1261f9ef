"""What has come of pushed tensors: every byte once, and all of them. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine_service.core.covered import Covered
from engine_service.core.update_messages import PushedHeader, StagePiece
from engine_service.errors import InvalidRequest
from relay_service.core.dtypes import DType

_DTYPES = {dtype.upper(): dtype for dtype in DType}
"""Types by the names that safetensors gives."""
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
        self._covered = [Covered(size) for size in self._sizes]
        self.bytes_total = sum(self._sizes)
        """Bytes of all tensors."""

    def add(self, piece: StagePiece) -> None:
        """Books a piece. Raises `InvalidRequest` for one that cannot be, or overlaps another."""
        if not 0 <= piece.tensor < len(self._tensors):
            raise InvalidRequest(f"there is no tensor {piece.tensor}", field="piece.tensor")
        tensor, size = self._tensors[piece.tensor], self._sizes[piece.tensor]
        width, end = _DTYPES[tensor.dtype].itemsize, piece.offset + len(piece.data)
        if piece.offset % width or end % width or not 0 <= piece.offset < end <= size:
            raise InvalidRequest(
                f"{tensor.name}: bytes {piece.offset} to {end} are no whole elements of its {size}",
                field="piece", tensor=tensor.name,
            )  # fmt: skip
        covered = self._covered[piece.tensor]
        if covered.overlaps(piece.offset, end):
            raise InvalidRequest(
                f"{tensor.name}: bytes {piece.offset} to {end} came twice", field="piece"
            )
        covered.add(piece.offset, end)

    def check_complete(self) -> None:
        """Raises `InvalidRequest` naming tensors of which something has not come."""
        missing = [
            f"{tensor.name} ({covered.missing} of {size} bytes)"
            for tensor, size, covered in zip(self._tensors, self._sizes, self._covered, strict=True)
            if covered.missing
        ]
        if missing:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise InvalidRequest(
                f"not all has come: missing are {', '.join(missing[:_LISTED])}{more}",
                field="piece",
            )


def _bytes_of(tensor: PushedHeader) -> int:
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(
            f"{tensor.name}: type {tensor.dtype!r:.32} is unknown", field="tensors",
            expected=" | ".join(_DTYPES), found=tensor.dtype,
        )  # fmt: skip
    if any(size < 0 for size in tensor.shape) or len(tensor.digest) not in (0, 16):
        raise InvalidRequest(f"{tensor.name}: its shape or digest cannot be", field="tensors")
    size = math.prod(tensor.shape) * _DTYPES[tensor.dtype].itemsize
    if not tensor.name or size > MAX_BYTES:
        raise InvalidRequest(f"{tensor.name!r}: {size} bytes cannot be", field="tensors")
    return size
