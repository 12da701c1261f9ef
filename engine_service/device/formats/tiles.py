"""Matrices in tiles, and how they are cut along them. Free of torch.

oneDNN packs a matrix in bands, one below another, each of so many rows; a band in tiles, one
beside another, each of so many columns. A tile lies in one piece, and its inside depends on
nothing but itself. So a packed matrix is one of bands and tiles, which is cut between two
tiles like any other. Where a tile belongs to two ranks, or to two checkpoint tensors, it
means something else in another cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from relay_service.core.cut import Part


class Tiles(NamedTuple):
    """How a matrix is packed."""

    rows: int
    columns: int
    group: int
    """Columns of a row that lie side by side; the next row of the tile follows."""

    @property
    def words(self) -> str:
        """Says it to people, and names what is cut along them."""
        return f"tiles of {self.rows} by {self.columns}"

    def shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Returns the shape of a packed matrix: bands, rows of a band, columns, padded."""
        return rows // self.rows, self.rows, -(-columns // self.columns) * self.columns

    def fault(self, parts: Sequence[Part]) -> str:
        """Says why a matrix of these parts isn't one of whole tiles; empty where it is."""
        if parts[0].columns[1] < self.columns:
            return f"packed in {self.words}, which are wider than it is"
        if fault := straddled(parts, self.rows, self.columns):
            return f"packed in {self.words}, and {fault}"
        if parts[-1].rows[1] % self.rows:
            return f"packed in {self.words}, the last of which have padded rows"
        return ""

    def cut(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Returns parts as bands, and as elements of a band, which lie tile by tile."""
        elements = self.rows * self.columns
        return tuple(
            Part(
                one.logical,
                (one.whole[0], one.whole[1] * elements),
                one.rows,
                (one.columns[0] * elements, one.columns[1] * elements),
            )
            for one in in_blocks(parts, self.rows, self.columns, self.words)
        )


def straddled(parts: Sequence[Part], rows: int, columns: int) -> str:
    """Says which tiles of a matrix don't belong to one part; empty where all do.

    They count from the corner of each logical tensor; those at its end may be smaller.
    """
    seams = any(part.rows[1] % rows for part in parts[:-1])
    if seams or any(_cuts_through(part.rows, part.whole[0], rows) for part in parts):
        return f"a tile of {rows} rows spans two parts"
    if any(_cuts_through(part.columns, part.whole[1], columns) for part in parts):
        return f"a tile of {columns} columns spans two parts"
    return ""


def in_blocks(parts: Sequence[Part], rows: int, columns: int, what: str) -> Iterator[Part]:
    """Yields parts in blocks of so many rows and columns, where there is one thing for each."""
    for part in parts:
        (top, height), (left, width) = part.rows, part.columns
        yield Part(
            f"{part.logical} {what}",
            (-(-part.whole[0] // rows), -(-part.whole[1] // columns)),
            (top // rows, -(-height // rows)),
            (left // columns, -(-width // columns)),
        )


def _cuts_through(span: tuple[int, int], whole: int, size: int) -> bool:
    """Returns whether a run begins or ends within a block."""
    first, end = span[0], sum(span)
    return bool(first % size or (end % size and end != whole))
