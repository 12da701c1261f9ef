"""Where requests wait while the instance is paused."""

import asyncio

import pytest
from virtual_time import settled, virtually

from engine_service.core.gate import Closing, Gate
from engine_service.errors import EngineError, QueueFull

CLOSED = Closing("somebody", "keep", 0.0)


class Callers:
    """A closed gate, and callers who come to it."""

    def __init__(self, room: int = 8) -> None:
        self.gate = Gate(lambda: room)
        self.gate.close(CLOSED)
        self.passed: list[str] = []
        self.tasks: dict[str, asyncio.Task] = {}

    async def come(self, *names: str) -> None:
        """Lets callers come, one after another."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._pass(name))
            await settled()

    async def _pass(self, name: str) -> bool:
        with self.gate.expecting(name) as ticket:
            await self.gate.passed(ticket)
            self.passed.append(name)
            return ticket.aborted


def test_an_open_gate_holds_nobody_up():
    """Whoever comes to an open gate passes at once."""

    async def scene():
        callers = Callers()
        callers.gate.open()
        await callers.come("a")
        assert callers.passed == ["a"]
        assert callers.gate.waiting == 0

    virtually(scene())


def test_waiting_in_order():
    """They are counted while it is closed and pass in their order when it opens."""

    async def scene():
        callers = Callers()
        await callers.come("a", "b", "c")
        assert (callers.passed, callers.gate.waiting) == ([], 3)
        callers.gate.open()
        await settled()
        assert (callers.passed, callers.gate.waiting) == (["a", "b", "c"], 0)

    virtually(scene())


def test_one_that_finds_it_closed_again_keeps_its_place():
    """A gate that is closed before the woken ones have run lets nobody through, nor past them."""

    async def scene():
        callers = Callers()
        await callers.come("a", "b")
        callers.gate.open()
        callers.gate.close(CLOSED)
        await callers.come("c")
        assert (callers.passed, callers.gate.waiting) == ([], 3)
        callers.gate.open()
        await settled()
        assert callers.passed == ["a", "b", "c"]

    virtually(scene())


def test_too_many():
    """One more than there is room for is refused; one that leaves makes room."""

    async def scene():
        callers = Callers(room=2)
        await callers.come("a", "b", "c")
        with pytest.raises(QueueFull, match="2 requests wait"):
            await callers.tasks["c"]
        callers.tasks["a"].cancel()
        await settled()
        assert callers.gate.waiting == 1
        await callers.come("d")
        assert callers.gate.waiting == 2
        callers.gate.open()
        await settled()
        assert callers.passed == ["b", "d"]

    virtually(scene())


def test_aborting_by_name():
    """An abort ends all of that name at once, each once; nobody is called nothing."""

    async def scene():
        callers = Callers()
        await callers.come("a", "", "b")
        assert callers.gate.abort("a") == 1
        assert callers.gate.abort("a") == 0
        assert callers.gate.abort("") == 0
        assert await callers.tasks["a"] is True
        assert callers.gate.waiting == 2
        assert callers.gate.abort_all() == 2
        assert [await callers.tasks[name] for name in ("", "b")] == [True, True]
        assert callers.gate.abort_all() == 0

    virtually(scene())


def test_one_that_has_passed_can_still_be_aborted():
    """A request that is on its way to the scheduler is known until it has got there."""
    gate = Gate(lambda: 8)
    with gate.expecting("a") as ticket:
        assert gate.abort_waiting() == 0
        assert gate.abort("a") == 1
        assert ticket.aborted
    assert gate.abort("a") == 0


def test_failing():
    """An error reaches whoever waits; a caller that was woken already is not told twice."""

    async def scene():
        callers = Callers()
        await callers.come("a", "b")
        callers.gate.abort("a")
        callers.gate.fail_all(EngineError("gone"))
        assert await callers.tasks["a"] is True
        with pytest.raises(EngineError, match="gone"):
            await callers.tasks["b"]
        assert callers.gate.waiting == 0

    virtually(scene())
