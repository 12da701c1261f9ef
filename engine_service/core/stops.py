"""Finds stop texts in text that comes in pieces. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Lets text through as soon as no stop text can begin in it any more."""

    def __init__(self, stops: Sequence[str], *, shows_stop: bool) -> None:
        """Takes stop texts, none of them empty; `shows_stop` lets the one that ended it through."""
        self._stops = stops
        self._shows_stop = shows_stop
        self._held = ""
        self.found = ""
        """The stop text that came; empty before."""

    def push(self, piece: str) -> str:
        """Takes a piece; returns the text that is final. Nothing follows once one is found."""
        if not self._stops:
            return piece
        text = self._held + piece
        # The one that ends first is the one that was complete first; the longest of those.
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            end, begin, self.found = min(hits)
            self._held = ""
            return text[: end if self._shows_stop else begin]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns what was held back; call once at the end of an answer without a stop text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
