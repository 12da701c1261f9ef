"""What a rank needs of each checkpoint tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from engine_service.device.checkpoint import TensorHeader
from engine_service.device.dtypes import SCALES_SUFFIX, stored_dtype
from engine_service.device.sharding import Slice
from relay_service.core.dtypes import DType


class Part(NamedTuple):
    """A slice of a checkpoint tensor."""

    header: TensorHeader
    slice: Slice

    @property
    def dtype(self) -> DType:
        """Type of its elements in the checkpoint. Raises `ValueError` for no floating one."""
        dtype = stored_dtype(self.header.dtype)
        if dtype is None:
            raise ValueError(f"{self.header.name} has dtype {self.header.dtype}")
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the slice in the checkpoint."""
        return self.slice.elements * self.dtype.itemsize

    def cut(self, first: int, piece: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Cuts a piece of the whole tensor: yields first element of the slice, and bytes.

        `piece` begins with element `first` of the whole tensor and may end within a row.
        """
        itemsize, width = self.dtype.itemsize, math.prod(self.slice.whole[1:])
        cursor, end = first, first + len(piece) // itemsize
        while cursor < end:
            row, column = divmod(cursor, width)
            rows = (end - cursor) // width if column == 0 else 0
            stop = (row + rows) * width if rows else min(end, (row + 1) * width)
            held = piece[(cursor - first) * itemsize : (stop - first) * itemsize]
            yield from self._cut_rows(row, column, max(1, rows), held)
            cursor = stop

    def _cut_rows(
        self, row: int, column: int, rows: int, piece: memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """Cuts whole rows, or a part of one row that begins with `column`."""
        itemsize, (top, height) = self.dtype.itemsize, self.slice.rows
        left, width = self.slice.columns
        size = len(piece) // rows
        begin, end = max(left, column), min(left + width, column + size // itemsize)
        first, last = max(row, top), min(row + rows, top + height)
        if begin >= end or first >= last:
            return
        piece = piece[(first - row) * size : (last - row) * size]
        if end - begin < size // itemsize:
            columns = slice((begin - column) * itemsize, (end - column) * itemsize)
            piece = memoryview(
                b"".join(piece[at : at + size][columns] for at in range(0, len(piece), size))
            )
        yield (first - top) * width + begin - left, piece


def parts_of(headers: Mapping[str, TensorHeader], slices: Mapping[str, Slice]) -> dict[str, Part]:
    """Finds each slice's tensor by its name, and the scales beside it, which are whole."""
    parts = {name: Part(headers[name], piece) for name, piece in slices.items()}
    scales = [headers[name + SCALES_SUFFIX] for name in slices if name + SCALES_SUFFIX in headers]
    return parts | {one.name: Part(one, Slice.by_rows(one.shape)) for one in scales}
