"""Bands of a matrix's rows: as much of it as is rounded and packed at once.

What a format makes of rows depends on no others, save where they share a tile. So a matrix is
processed band by band, in memory that stays in cache: numbers of 32 bits for all of it at once
would take several times the matrix's own memory, and longer.
"""

from __future__ import annotations

from collections.abc import Iterator

BAND_ROWS = 128
"""A multiple of the rows of every tile; more of them are no faster."""


def bands(rows: int, band_rows: int) -> Iterator[slice]:
    """Yields the rows of one band after another; the last one may be smaller."""
    for first in range(0, rows, band_rows):
        yield slice(first, min(first + band_rows, rows))
