"""An event loop whose clock jumps: waiting takes no time, and waiting for ever is an error."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(AssertionError):
    """Nobody can go on any more, now or later."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, then jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Returns the time that has been waited for."""
        return self.now


class _Jumping(selectors.SelectSelector):
    """Waits for no socket: tests in virtual time have none."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is None:
            raise Deadlock("nothing is ready and no timer runs")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs work to its end in virtual time and returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


async def settled() -> None:
    """Lets everybody go on who can without a clock."""
    for _ in range(20):
        await asyncio.sleep(0)
