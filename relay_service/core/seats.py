"""Sends readers on where a source is busy, so that they form a chain. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

READERS_AT_FULL_SPEED = 1
"""One reader takes what a link, or a source's egress cap, gives; a second one halves it."""
FRESH_SECONDS = 5.0
"""Whoever came longer ago may have gone elsewhere."""
MAX_REMEMBERED = 4096


class Seats:
    """Who came to one source, and in which order: who finds it busy reads from the last one.

    So a hundred that come at once form one chain after one question each, instead of
    following it from its head. What blocks there are they need not hear along the chain:
    a manifest is the same wherever it is, so they pass it on as a tree.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._came: list[str] = []
        """In order, since nobody came for a while; each name once, at its last place."""
        self._came_at = 0.0

    def send_on(self, readers: Collection[str], reader: str) -> str:
        """Returns whom `reader` had better read from; empty if there is a seat for it here."""
        now = self._clock()
        others = sorted(set(readers) - {reader})
        if now - self._came_at > FRESH_SECONDS or len(self._came) >= MAX_REMEMBERED:
            self._came = []
        last = self._came[-1] if self._came else ""
        ahead = ""
        if len(others) >= READERS_AT_FULL_SPEED:
            ahead = last if last not in ("", reader) else others[-1]
        if reader in self._came:
            self._came.remove(reader)
        self._came.append(reader)
        self._came_at = now
        return ahead

    def line_of(self, ahead: str, readers: Collection[str]) -> list[str]:
        """Names those between this source and whom it has just sent somebody to, nearest first.

        Each one was sent to the one before it. Where the first was sent nobody remembers, so all
        readers are named: one too many is a reader refused, one too few may close a circle.
        """
        *earlier, reader = self._came
        if ahead not in earlier:
            return []  # it has a seat here
        came = earlier[: earlier.index(ahead)]
        return [*reversed(came), *sorted(set(readers) - {*came, ahead, reader})]

    def manifest_holder(self, reader: str) -> str:
        """Returns who passes the manifest on to a reader; empty for the source itself.

        Each one passes it on to two, so the last of a thousand has it after ten steps.
        """
        place = self._came.index(reader) + 1
        return self._came[place // 2 - 1] if place > 1 else ""
