"""Waiting for a peer that may be silent, and being stopped oneself."""

import asyncio
import time

from relay_service.core.patience import Patience


async def test_a_silent_peer_is_given_up():
    """A wait that is too long ends the block, also when the wait before it was answered."""

    async def listen() -> None:
        async with Patience(0.05) as patience:
            await patience.wait(asyncio.sleep(0))
            await patience.wait(asyncio.Event().wait())

    listening = asyncio.create_task(listen())
    await asyncio.wait([listening], timeout=10)
    assert isinstance(listening.exception(), TimeoutError)


async def test_only_waits_count():
    """What is done between the waits takes as long as it takes."""
    async with Patience(0.02) as patience:
        for _ in range(3):
            assert await patience.wait(asyncio.sleep(0, "answer")) == "answer"
            await asyncio.sleep(0.06)


async def test_who_was_stopped_blames_nobody():
    """A process that did not run hears what came meanwhile, however long that was."""
    came = asyncio.Event()
    async with Patience(0.05) as patience:
        asyncio.get_running_loop().call_soon(time.sleep, 0.2)
        asyncio.get_running_loop().call_later(0.21, came.set)
        await patience.wait(came.wait())


async def test_a_deadline_around_it_stays_one():
    """Being cancelled passes through as what it is: the peer is not to blame."""

    async def listen() -> None:
        async with Patience(10) as patience:
            await patience.wait(asyncio.Event().wait())

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait([listening])
    assert listening.cancelled()
