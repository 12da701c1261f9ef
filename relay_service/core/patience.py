"""Bounds how long a peer may be silent, by the time that this process runs. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
_STEPS = 10


class Patience:
    """Raises `TimeoutError` out of its block when one wait in it takes too long.

    Time passes in steps. A process that was stopped itself, or starved, finds one step
    gone when it wakes, and hears what came meanwhile before it blames anybody.
    """

    def __init__(self, seconds: float) -> None:
        self._step_seconds = seconds / _STEPS
        self._silent_steps = 0
        self._waiting = False
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._watch()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._next_step.cancel()
        await self._limit.__aexit__(kind, error, trace)

    async def wait(self, answer: Awaitable[T]) -> T:
        """Awaits the peer. Only time spent here counts, and each wait anew."""
        self._silent_steps, self._waiting = 0, True
        try:
            return await answer
        finally:
            self._waiting = False

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_step = loop.call_later(self._step_seconds, self._step)

    def _step(self) -> None:
        self._silent_steps += self._waiting
        if self._silent_steps > _STEPS:
            self._limit.reschedule(asyncio.get_running_loop().time())
        else:
            self._watch()
