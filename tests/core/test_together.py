"""Nothing is left running behind."""

import asyncio
import threading

import pytest
from fakes import eventually

from relay_service.core.together import in_thread, jointly, together


async def test_results_in_order():
    """The results are those of the parts, in their order."""

    async def part(number: int) -> int:
        await asyncio.sleep(0)
        return number

    assert await together(*(part(number) for number in range(5))) == [0, 1, 2, 3, 4]
    assert await together() == []


async def test_a_failure_waits_for_the_others():
    """The first failure is raised once every part has ended."""
    ended = []

    async def fails() -> None:
        raise ValueError("first")

    async def works() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(True)
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        await together(fails(), works())
    assert ended == [True]


@pytest.mark.parametrize("ends_with", [None, KeyError("second")])
async def test_a_failure_ends_the_others(ends_with):
    """Whatever they do when they are cancelled; the first error is raised, and is no group."""
    began, ended = asyncio.Event(), []

    async def fails() -> None:
        await began.wait()
        raise ValueError("first")

    async def works() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
            if ends_with:
                raise ends_with

    with pytest.raises(ValueError, match="first"):
        await jointly(fails(), works())
    assert ended == [True]


async def test_what_is_cancelled_ends_its_parts():
    """As a time limit does."""
    ended = []

    async def works() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await jointly(works(), works())
    assert ended == [True, True]


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_a_thread_ends_before_its_caller(cancels):
    """However often it is cancelled, a caller does not return while its thread still works."""
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(20)
        ended.set()

    async def both() -> None:
        await together(in_thread(work), asyncio.sleep(3600))

    task = asyncio.create_task(both())
    await eventually(began.is_set)
    for _ in range(cancels):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_thread_returns_and_raises():
    """What the thread returns or raises is what the caller gets."""
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
