"""Sends readers on where a source is busy, so that they form a chain. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

READERS_AT_FULL_SPEED = 1
"""One reader takes what a link, or a source's egress cap, gives; a second one halves it."""
FRESH_SECONDS = 5.0
"""Whoever came longer ago may have gone elsewhere."""


class Seats:
    """Who came last to one source: the next one that finds it busy reads from that one.

    So a hundred that come at once form one chain after one question each, instead of
    following it from its head.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = ""
        self._came_at = 0.0

    def send_on(self, readers: Collection[str], reader: str) -> str:
        """Returns whom `reader` had better read from; empty if there is a seat for it here."""
        now = self._clock()
        others = sorted(set(readers) - {reader})
        ahead = ""
        if len(others) >= READERS_AT_FULL_SPEED:
            fresh = self._last not in ("", reader) and now - self._came_at <= FRESH_SECONDS
            ahead = self._last if fresh else others[-1]
        self._last, self._came_at = reader, now
        return ahead
