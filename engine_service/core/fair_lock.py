"""A fair reader-writer lock for tasks of one event loop. Plain Python.

Readers are admissions of requests, the writer is a commit. Whoever comes first is served
first, so neither side starves; who leaves the queue disturbs nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from engine_service.errors import WaitTimeout


class Side(StrEnum):
    """How a lock is held."""

    READER = "reader"
    WRITER = "writer"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, or waits for it."""

    side: Side
    purpose: str
    waits: bool
    age_seconds: float
    """Since it came."""


@dataclass(eq=False, slots=True)
class _Entry:
    side: Side
    purpose: str
    since: float
    granted: asyncio.Future[None]


class FairLock:
    """Held by any number of readers, or by one writer."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        """Holders and waiters together, in the order in which they came."""

    @asynccontextmanager
    async def reading(self, purpose: str, timeout: float | None = None) -> AsyncIterator[None]:
        """Holds the reader side. Raises `WaitTimeout` after so many seconds of waiting."""
        entry = await self._acquired(Side.READER, purpose, timeout)
        try:
            yield
        finally:
            self._leave(entry)

    @asynccontextmanager
    async def writing(self, purpose: str, timeout: float | None = None) -> AsyncIterator[None]:
        """Holds the writer side. Raises `WaitTimeout` after so many seconds of waiting."""
        entry = await self._acquired(Side.WRITER, purpose, timeout)
        try:
            yield
        finally:
            self._leave(entry)

    def holders(self) -> list[Holder]:
        """Lists who holds it and who waits, in the order in which they came."""
        if not self._entries:
            return []
        now = asyncio.get_running_loop().time()
        return [
            Holder(one.side, one.purpose, not one.granted.done(), now - one.since)
            for one in self._entries
        ]

    async def _acquired(self, side: Side, purpose: str, timeout: float | None) -> _Entry:
        loop = asyncio.get_running_loop()
        entry = _Entry(side, purpose, loop.time(), loop.create_future())
        self._entries.append(entry)
        self._grant()
        try:
            async with asyncio.timeout(timeout):
                await entry.granted
        except TimeoutError:
            held = [one for one in self._entries if one is not entry and one.granted.done()]
            self._leave(entry)
            raise WaitTimeout(
                f"{purpose}: waited {timeout:g} s for {held[0].purpose if held else 'the lock'}",
                field="timeout",
            ) from None
        except BaseException:
            self._leave(entry)
            raise
        return entry

    def _leave(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._grant()

    def _grant(self) -> None:
        """Lets in a writer that is first, or all readers before the first writer."""
        for number, entry in enumerate(self._entries):
            if number and entry.side is Side.WRITER:
                return
            if not entry.granted.done():
                entry.granted.set_result(None)
            if entry.side is Side.WRITER:
                return
