"""When there is news of an instance, in virtual time."""

import asyncio

import pytest
from engines import Service
from experts import STEPS, WHOLE, FakeRecovery
from updates import virtually

from engine_service.core.gate import Closing
from engine_service.core.ports import FillProgress
from engine_service.core.update_request import Phase, UpdateProgress
from engine_service.core.watching import news
from relay_service.core.instance import State, Weights

SETTLED_SECONDS = 5.0
CLOSED = Closing("ops", "keep", 0.0)


class Watcher:
    """Counts news of an instance, and when they came."""

    def __init__(self) -> None:
        self.instance = Service().instance
        self.times: list[float] = []
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for _ in news(self.instance):
            self.times.append(asyncio.get_running_loop().time())

    async def settled(self) -> int:
        """Waits until nothing more can come of what has changed; returns how many came."""
        before = len(self.times)
        await asyncio.sleep(SETTLED_SECONDS)
        return len(self.times) - before


def in_scene(scene):
    """Runs a scene with a watcher in virtual time."""

    async def run():
        watcher = Watcher()
        assert await watcher.settled() == 1
        await scene(watcher)
        watcher.task.cancel()
        await asyncio.wait([watcher.task])

    virtually(run)


def _label(instance):
    instance.engine.weights = Weights("v2", "ab" * 16, 1)


def _phase(instance):
    instance.updating = lambda: UpdateProgress(phase=Phase.STAGED, session="one")


def _fill(instance):
    instance.filling = FillProgress(phase="matching")


def _members(instance):
    instance.membership = WHOLE


def _recovery(instance):
    instance.recovery = FakeRecovery(instance)
    instance.recovery.progress = STEPS[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda instance: instance.lifecycle.to(State.PAUSED, "why"),
        lambda instance: instance.engine.gate.close(CLOSED),
        _label,
        _phase,
        _fill,
        _members,
        _recovery,
    ],
    ids=["state", "gate", "version", "update", "fill", "members", "recovery"],
)
def test_what_is_new(change):
    """Each change is told once, and then there is quiet."""

    async def scene(watcher):
        change(watcher.instance)
        assert await watcher.settled() == 1
        assert await watcher.settled() == 0

    in_scene(scene)


def test_ten_times_a_second_at_most():
    """However often something changes, the last of it is told, and no more than that often."""

    async def scene(watcher):
        began, seen = len(watcher.times), []
        for number in range(1000):
            watcher.instance.engine.weights = Weights(f"v{number}", "ab" * 16, number)
            watcher.instance.lifecycle.to((State.PAUSED, State.READY)[number % 2])
            await asyncio.sleep(0.002)
            seen.append(len(watcher.times) - began)
        assert 10 <= seen[499] <= 11
        assert seen[999] <= 21
        assert await watcher.settled() <= 1
        assert watcher.times[-1] >= asyncio.get_running_loop().time() - SETTLED_SECONDS - 0.2

    in_scene(scene)


def test_bytes_that_come():
    """How far a fill is, is news once a second, for as long as bytes come."""

    async def scene(watcher):
        watcher.instance.filling = FillProgress(phase="transferring")
        assert await watcher.settled() == 1
        began = len(watcher.times)
        for done in range(100):
            watcher.instance.filling = FillProgress(phase="transferring", bytes_verified=done)
            await asyncio.sleep(0.1)
        assert 9 <= len(watcher.times) - began <= 11

    in_scene(scene)


def test_the_end():
    """The last news is that it has stopped."""

    async def scene(watcher):
        watcher.instance.lifecycle.to(State.FAILED)
        watcher.instance.lifecycle.to(State.STOPPED)
        assert await watcher.settled() == 1
        assert watcher.task.done()

    in_scene(scene)
