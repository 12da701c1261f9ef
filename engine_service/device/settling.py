"""Has huge pages back the weights, once they serve.

A step reads all weights, and from pages of 4 KiB that takes a tenth longer. To move them
takes a second per GiB, and much longer on a host whose memory is in pieces: nobody who
waits for READY should wait for it, so a thread does it beside the first steps.
"""

from __future__ import annotations

import threading

from engine_service.device.arena import Arena

THREAD = "settling"


class Settler:
    """Moves one arena, once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before = ""
        self._moving: threading.Thread | None = None
        self._told = False

    def news(self) -> str:
        """Begins, unless it has begun; returns which pages back the arena, once that is new."""
        if self._moving is None:
            self._before = self._arena.page_kind
            self._moving = threading.Thread(
                target=self._arena.gather_pages, name=THREAD, daemon=True
            )
            self._moving.start()
        if self._told or self._moving.is_alive():
            return ""
        self._told = True
        found = self._arena.page_kind
        return "" if found == self._before else found
