"""The gate: where requests wait while the instance is paused. Plain Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine_service.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Closing:
    """How a gate was closed."""

    operator: str
    mode: str
    """What became of the requests that ran."""
    since: float
    """On the clock of the event loop, in seconds."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way to the scheduler."""

    name: str
    """To abort it by; empty for none."""
    aborted: bool = False
    """Whether somebody has ended it already."""


class Gate:
    """Open, or closed by somebody; knows every request that has not reached the scheduler."""

    def __init__(self, room: Callable[[], int]) -> None:
        """`room` says how many may wait here."""
        self.closed_by: Closing | None = None
        self._room = room
        self._closed_at = 0.0
        self._seconds_closed = 0.0
        """Before it was closed last."""
        self._expected: dict[Ticket, None] = {}
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        """In the order in which they came."""

    @property
    def seconds_closed(self) -> float:
        """Seconds for which it has been closed, all in all."""
        now = time.monotonic() - self._closed_at if self.closed_by else 0.0
        return self._seconds_closed + now

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @contextmanager
    def expecting(self, name: str) -> Iterator[Ticket]:
        """Lets a request be aborted before the scheduler knows it."""
        ticket = Ticket(name)
        self._expected[ticket] = None
        try:
            yield ticket
        finally:
            del self._expected[ticket]

    async def passed(self, ticket: Ticket) -> None:
        """Waits until the gate is open, or the request was aborted.

        Raises `QueueFull` when too many wait, or what `fail_all` was given.
        """
        if self.closed_by and not ticket.aborted and self.waiting >= self._room():
            raise QueueFull(
                f"{self.waiting} requests wait at the gate already",
                field="max_waiting", hint="the instance is paused; try another one",
            )  # fmt: skip
        try:
            while self.closed_by and not ticket.aborted:
                # One that finds it closed again keeps its place.
                self._waiting[ticket] = asyncio.get_running_loop().create_future()
                await self._waiting[ticket]
        finally:
            self._waiting.pop(ticket, None)

    def close(self, closing: Closing) -> None:
        """Closes it, or says anew who has."""
        if self.closed_by is None:
            self._closed_at = time.monotonic()
        self.closed_by = closing

    def open(self) -> None:
        """Opens it and wakes whoever waits, in their order. Does nothing to an open one."""
        self._seconds_closed = self.seconds_closed
        self.closed_by = None
        for future in self._waiting.values():
            _wake(future)

    def abort(self, name: str) -> int:
        """Ends requests of a name that are on their way; returns how many."""
        return self._abort([one for one in self._expected if name and one.name == name])

    def abort_waiting(self) -> int:
        """Ends every request that waits here; returns how many."""
        return self._abort(list(self._waiting))

    def abort_all(self) -> int:
        """Ends every request that is on its way; returns how many."""
        return self._abort(list(self._expected))

    def fail_all(self, error: Exception) -> None:
        """Ends every request that waits here with an error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def _abort(self, tickets: list[Ticket]) -> int:
        ended = [ticket for ticket in tickets if not ticket.aborted]
        for ticket in ended:
            ticket.aborted = True
            if ticket in self._waiting:
                _wake(self._waiting[ticket])
        return len(ended)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
