"""Whose turn it is to change what lies in the arenas, one after another. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_service.errors import UpdateBusy

MAX_WAITING = 4
"""Most updates that wait for their turn."""
MOVES = "a move of experts"


class Turn:
    """Held by a session of an update from begin to end, or while experts are moved."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._since = 0.0
        self.holder = ""
        """Who has it, in words; empty for nobody."""
        self.waiting = 0
        """How many wait for it."""

    async def take(self, holder: str, wait: float = 0.0) -> None:
        """Waits for the turn, at most so many seconds.

        Raises `UpdateBusy`, which names who has it, and at once where too many wait already.
        """
        if self._lock.locked() and (wait <= 0 or self.waiting >= MAX_WAITING):
            raise self.busy()
        await self._acquire(wait)
        self.holder, self._since = holder, asyncio.get_running_loop().time()

    def give(self) -> None:
        """Ends the turn."""
        self.holder = ""
        self._lock.release()

    @asynccontextmanager
    async def taken(self, holder: str) -> AsyncIterator[None]:
        """Waits for the turn as long as it takes, and holds it."""
        async with self._lock:
            self.holder, self._since = holder, asyncio.get_running_loop().time()
            try:
                yield
            finally:
                self.holder = ""

    async def _acquire(self, wait: float) -> None:
        self.waiting += 1
        try:
            # With nobody before, it is there at once: no limit must come in between.
            async with asyncio.timeout(wait if self._lock.locked() else None):
                await self._lock.acquire()
        except TimeoutError:
            raise self.busy() from None
        finally:
            self.waiting -= 1

    def busy(self) -> UpdateBusy:
        """Returns the error that says who has it."""
        age = asyncio.get_running_loop().time() - self._since
        return UpdateBusy(
            f"{self.holder or 'somebody before'} changes the weights, for {age:.1f} s by now; "
            f"{self.waiting} wait for that",
            holder=self.holder, age_seconds=f"{age:.3f}", waiting=str(self.waiting),
            hint="wait for it, or abort its session",
        )  # fmt: skip
