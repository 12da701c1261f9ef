"""Who holds the lock of admission and commit, and in which order."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import settled, virtually

from engine_service.core.fair_lock import FairLock, Side
from engine_service.errors import WaitTimeout


class Scene:
    """A lock and the tasks that want it."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self.inside: list[str] = []
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task] = {}

    async def come(self, name: str, seconds: float = 1e6, timeout: float | None = None) -> None:
        """Lets a task come: a reader, or a writer whose name begins with `w`."""
        self.tasks[name] = asyncio.create_task(self._hold(name, seconds, timeout))
        await settled()

    async def leave(self, *names: str) -> None:
        """Makes tasks leave, wherever they are."""
        for name in names:
            self.tasks[name].cancel()
        await settled()

    async def _hold(self, name: str, seconds: float, timeout: float | None) -> None:
        hold = self.lock.writing if name.startswith("w") else self.lock.reading
        async with hold(name, timeout):
            self.inside.append(name)
            self.order.append(name)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.inside.remove(name)


def test_readers_together_writers_alone():
    """Readers share it; a writer waits for them, and whoever comes after it waits for it."""

    async def scene():
        one = Scene()
        for name in ("r1", "r2", "w1", "r3", "w2"):
            await one.come(name)
        assert one.inside == ["r1", "r2"]
        await one.leave("r1")
        assert one.inside == ["r2"]
        await one.leave("r2")
        assert one.inside == ["w1"]
        await one.leave("w1")
        assert one.inside == ["r3"]
        await one.leave("r3")
        assert one.inside == ["w2"]

    virtually(scene())


def test_leaving_the_queue():
    """A writer that gives up lets the readers behind it in at once."""

    async def scene():
        one = Scene()
        for name in ("r1", "w1", "r2", "r3"):
            await one.come(name)
        await one.leave("w1")
        assert one.inside == ["r1", "r2", "r3"]

    virtually(scene())


def test_one_that_is_cancelled_as_its_turn_comes():
    """Whoever is let in and cancelled in the same moment does not take the lock along."""

    async def scene():
        one = Scene()
        await one.come("w1")
        await one.come("w2")
        await one.come("r1")
        one.tasks["w1"].cancel()
        await asyncio.sleep(0)
        one.tasks["w2"].cancel()
        await settled()
        assert one.inside == ["r1"]

    virtually(scene())


def test_deadline():
    """A wait that takes too long says for whom it has waited, and is out of the queue."""

    async def scene():
        one = Scene()
        await one.come("reading the prompt", seconds=10)
        await one.come("w1", timeout=3)
        await one.come("r2")
        with pytest.raises(WaitTimeout, match="w1: waited 3 s for reading the prompt"):
            await one.tasks["w1"]
        await settled()
        assert one.inside == ["reading the prompt", "r2"]
        assert asyncio.get_running_loop().time() == pytest.approx(3)

    virtually(scene())


def test_who_holds_it():
    """Holders and waiters are listed in their order, with side, purpose and age."""

    async def scene():
        one = Scene()
        assert one.lock.holders() == []
        await one.come("r1")
        await asyncio.sleep(2)
        await one.come("w1")
        await asyncio.sleep(1)
        found = [(h.side, h.purpose, h.waits, h.age_seconds) for h in one.lock.holders()]
        assert found == [(Side.READER, "r1", False, 3), (Side.WRITER, "w1", True, 1)]
        await one.leave("r1", "w1")
        assert one.lock.holders() == []

    virtually(scene())


@given(st.lists(st.tuples(st.sampled_from("rw"), st.integers(1, 5), st.integers(0, 3))))
def test_everybody_gets_in_and_in_order(callers: Sequence[tuple[str, int, int]]):
    """Whoever comes, whenever and for how long: all get in in their turn, writers alone."""

    async def scene():
        one = Scene()
        names = [f"{side}{number}" for number, (side, _, _) in enumerate(callers)]
        for name, (_, seconds, pause) in zip(names, callers, strict=True):
            await one.come(name, seconds)
            writers = [inside for inside in one.inside if inside.startswith("w")]
            assert not writers or len(one.inside) == 1
            await asyncio.sleep(pause)
        if one.tasks:
            await asyncio.wait(one.tasks.values())
        assert _readers_sorted(one.order) == names
        assert one.lock.holders() == []

    virtually(scene())


def _readers_sorted(names: list[str]) -> list[str]:
    """Readers who are let in together may enter in any order; nobody crosses a writer."""
    runs = [list(run) for _, run in itertools.groupby(names, lambda name: name[0])]
    return [name for run in runs for name in sorted(run, key=lambda n: int(n[1:]))]
