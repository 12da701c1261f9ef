"""What a plan consists of: runs of bytes from one arena to another, as few as possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class Copy(msgspec.Struct, frozen=True):
    """Moves `count` runs of `nbytes`, which lie at equal distances on both sides."""

    source: int
    """Index of the source."""
    source_offset: int
    """Of the first run in the source's arena, in bytes; so is `target_offset`."""
    target_offset: int
    nbytes: int
    """Of one run."""
    count: int = 1
    source_stride: int = 0
    """Bytes from the start of a run to that of the next; 0 for a single run."""
    target_stride: int = 0
    unit: str = ""
    """Name of the unit that it moves whole: its blocks have the source's digests."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return self.nbytes * self.count

    @property
    def source_span(self) -> int:
        """Bytes of the source from the start of the first run to the end of the last one."""
        return (self.count - 1) * self.source_stride + self.nbytes

    @property
    def target_span(self) -> int:
        """The same of the target."""
        return (self.count - 1) * self.target_stride + self.nbytes


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """Joins what lies side by side on both sides; returns it in order of the target.

    Copies of one row still say where the next row would be.
    """
    result: list[Copy] = []
    for copy in sorted(map(_straight, copies), key=lambda one: (one.source, one.target_offset)):
        if result and (joined := _joined(result[-1], copy)):
            result[-1] = _straight(joined)
        else:
            result.append(copy)
    single = (
        msgspec.structs.replace(one, source_stride=0, target_stride=0) if one.count == 1 else one
        for one in result
    )
    return sorted(single, key=lambda one: one.target_offset)


def within(copy: Copy, start: int, end: int) -> Iterator[Copy]:
    """Yields what a copy takes from bytes `start` to `end` of the source; offsets count from there.

    That is three copies at most: a piece of a run, whole runs, and a piece of a run.
    """
    step = copy.source_stride or copy.nbytes
    first = max(0, (start - copy.source_offset) // step)
    until = min(copy.count, -(-(end - copy.source_offset) // step))
    if first >= until:
        return
    last_end = copy.source_offset + (until - 1) * step + copy.nbytes
    whole_first = first + (copy.source_offset + first * step < start)
    whole_until = until - (last_end > end)
    if whole_first > first:
        yield from _piece(copy, first, start, end)
    if whole_until > whole_first:
        yield msgspec.structs.replace(
            copy, count=whole_until - whole_first, unit="",
            source_offset=copy.source_offset + whole_first * step - start,
            target_offset=copy.target_offset + whole_first * copy.target_stride,
        )  # fmt: skip
    if whole_first <= whole_until < until:
        yield from _piece(copy, whole_until, start, end)


def _piece(copy: Copy, run: int, start: int, end: int) -> Iterator[Copy]:
    """Yields what lies from `start` to `end` of one run, if anything does."""
    at = copy.source_offset + run * copy.source_stride
    left, right = max(at, start), min(at + copy.nbytes, end)
    if left < right:
        to = copy.target_offset + run * copy.target_stride + left - at
        yield Copy(copy.source, left - start, to, right - left)


def _straight(copy: Copy) -> Copy:
    """Returns one run where the runs leave no gap on either side."""
    if not copy.nbytes == copy.source_stride == copy.target_stride:
        return copy
    return Copy(copy.source, copy.source_offset, copy.target_offset, copy.total_bytes)


def _joined(first: Copy, second: Copy) -> Copy | None:
    """Returns both as one; None where they aren't a wider row, or more rows."""
    if first.source != second.source:
        return None
    steps = (
        second.source_offset - first.source_offset,
        second.target_offset - first.target_offset,
    )
    strides = first.source_stride, first.target_stride
    if strides != (second.source_stride, second.target_stride):
        return None
    if steps == (first.nbytes, first.nbytes) and first.count == second.count:
        return msgspec.structs.replace(first, nbytes=first.nbytes + second.nbytes)
    below = first.count * strides[0], first.count * strides[1]
    if steps == below and first.nbytes == second.nbytes:
        return msgspec.structs.replace(first, count=first.count + second.count)
    return None
