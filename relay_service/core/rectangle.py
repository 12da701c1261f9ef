"""Rows and columns of a matrix, as a rectangle of half-open bounds. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self


class Rectangle(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right`, the latter of each excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        """Number of elements; 0 where it has no rows or no columns."""
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    def shared(self, other: Self) -> Self:
        """Returns what lies in both; its area is 0 where nothing does."""
        return type(self)(
            max(self.top, other.top), min(self.bottom, other.bottom),
            max(self.left, other.left), min(self.right, other.right),
        )  # fmt: skip

    def without(self, other: Self) -> Iterator[Self]:
        """Yields what `other` leaves of it: up to four disjoint rectangles, whole rows first."""
        hole = self.shared(other)
        if not hole.area:
            yield self
            return
        sides = (
            self._replace(bottom=hole.top),
            self._replace(top=hole.bottom),
            hole._replace(left=self.left, right=hole.left),
            hole._replace(left=hole.right, right=self.right),
        )
        yield from (side for side in sides if side.area)
