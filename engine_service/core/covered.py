"""Keeps account of which elements of a tensor have come, in any order. Plain arithmetic."""

from __future__ import annotations

from bisect import bisect_left


class Covered:
    """Runs of elements that have come, in order, none touching the next."""

    def __init__(self, size: int) -> None:
        """`size` is the number of elements in all."""
        self._size = size
        self._firsts: list[int] = []
        self._ends: list[int] = []

    @property
    def missing(self) -> int:
        """Number of elements that have not come."""
        return self._size - sum(self._ends) + sum(self._firsts)

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return self._firsts == [0] and self._ends == [self._size]

    def overlaps(self, first: int, end: int) -> bool:
        """Returns whether one of these elements has come."""
        later = bisect_left(self._ends, first + 1)
        return later < len(self._firsts) and self._firsts[later] < end

    def add(self, first: int, end: int) -> None:
        """Adds elements none of which has come."""
        after = bisect_left(self._firsts, end)
        joins_next = after < len(self._firsts) and self._firsts[after] == end
        joins_last = after > 0 and self._ends[after - 1] == first
        if joins_last and joins_next:
            self._ends[after - 1 : after + 1] = [self._ends[after]]
            del self._firsts[after]
        elif joins_last:
            self._ends[after - 1] = end
        elif joins_next:
            self._firsts[after] = first
        else:
            self._firsts.insert(after, first)
            self._ends.insert(after, end)
