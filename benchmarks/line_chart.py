"""Draws one line as a PNG, with the standard library alone: no plotting package is installed."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 360, 48
WHITE, GREY, BLACK, BLUE = (255, 255, 255), (210, 210, 210), (40, 40, 40), (30, 90, 200)
_GLYPHS = {
    "0": "111101101101111", "1": "010110010010111", "2": "111001111100111",
    "3": "111001111001111", "4": "101101111001001", "5": "111100111001111",
    "6": "111100111101111", "7": "111001001001001", "8": "111101111101111",
    "9": "111101111001111", ".": "000000000000010",
}  # fmt: skip
_GLYPH_WIDTH, _GLYPH_SCALE = 3, 3


class Canvas:
    """Pixels in RGB."""

    def __init__(self) -> None:
        self._rows = [bytearray(WHITE * WIDTH) for _ in range(HEIGHT)]

    def dot(self, x: float, y: float, colour: tuple[int, int, int], size: int = 1) -> None:
        """Fills a square around a point."""
        for row in range(round(y) - size // 2, round(y) - size // 2 + size):
            for column in range(round(x) - size // 2, round(x) - size // 2 + size):
                if 0 <= row < HEIGHT and 0 <= column < WIDTH:
                    self._rows[row][3 * column : 3 * column + 3] = bytes(colour)

    def line(
        self, start: tuple[float, float], end: tuple[float, float],
        colour: tuple[int, int, int], size: int = 1,
    ) -> None:  # fmt: skip
        """Draws a straight line."""
        steps = round(max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1))
        for n in range(steps + 1):
            part = n / steps
            x, y = (a + (b - a) * part for a, b in zip(start, end, strict=True))
            self.dot(x, y, colour, size)

    def number(self, text: str, x: float, y: float) -> None:
        """Writes a number, its left upper corner at a point."""
        for place, letter in enumerate(text):
            left = x + place * (_GLYPH_WIDTH + 1) * _GLYPH_SCALE
            for at, bit in enumerate(_GLYPHS[letter]):
                if bit == "1":
                    row, column = divmod(at, _GLYPH_WIDTH)
                    self.dot(
                        left + column * _GLYPH_SCALE, y + row * _GLYPH_SCALE, BLACK, _GLYPH_SCALE
                    )

    def png(self) -> bytes:
        """Returns the file (RFC 2083): 8 bits a channel, no filter."""
        header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
        body = zlib.compress(b"".join(b"\0" + row for row in self._rows), 9)
        chunks = [(b"IHDR", header), (b"IDAT", body), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )


def write_chart(path: Path, points: Sequence[tuple[float, float]]) -> None:
    """Draws values, 0 to 2, over counts on a logarithmic axis; the line at 1 is the bound."""
    canvas, top = Canvas(), max(count for count, _ in points)

    def place(count: float, value: float) -> tuple[float, float]:
        across = math.log(count) / math.log(top) if top > 1 else 0
        x = MARGIN + across * (WIDTH - 2 * MARGIN)
        return x, HEIGHT - MARGIN - value / 2 * (HEIGHT - 2 * MARGIN)

    for value in (0, 0.5, 1, 1.5, 2):
        colour = BLACK if value in (0, 1) else GREY
        canvas.line(place(1, value), place(top, value), colour)
        canvas.number(str(value), 8, place(1, value)[1] - 6)
    for count, _ in points:
        canvas.line(place(count, 0), place(count, 2), GREY)
        canvas.number(str(count), place(count, 0)[0] - 6, HEIGHT - MARGIN + 12)
    for one, other in pairwise(points):
        canvas.line(place(*one), place(*other), BLUE, 3)
    for point in points:
        canvas.dot(*place(*point), BLUE, 9)
    path.write_bytes(canvas.png())
