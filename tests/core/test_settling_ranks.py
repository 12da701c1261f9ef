"""Who lives is found out while commands are in work, on either stream: over real channels."""

import asyncio
import socket

import pytest

from engine_service.core.member_messages import Beat
from engine_service.core.messages import Done, Failed, decode_command, encode
from engine_service.core.rank_commands import Passed
from engine_service.core.rank_worker import RankWorker
from engine_service.core.ranks import RankGroup
from engine_service.core.step_messages import Step
from engine_service.core.update_messages import DropStaging, OpenStaging
from engine_service.errors import RankDied, RanksLost
from relay_service.core.channel import AsyncChannel, ChannelClosed
from relay_service.core.manifest import Manifest

OPEN = OpenStaging(serves=Manifest(0, 0, ()))
PATIENCE_SECONDS = 0.5


class Process:
    """A rank's process: what it answers, until it is killed."""

    pid = 1

    def __init__(self, *channels: AsyncChannel) -> None:
        self.returncode: int | None = None
        self.hangs = False
        self._ended = asyncio.Event()
        self._channels = channels
        self._tasks = [asyncio.ensure_future(self._serve(one)) for one in channels]

    async def _serve(self, channel: AsyncChannel) -> None:
        """Answers at once, except what is staged: that is at work until it is dropped."""
        staged = False
        try:
            while True:
                command = decode_command(await channel.receive())
                if self.hangs:
                    await asyncio.Event().wait()
                if isinstance(command, OpenStaging):
                    staged = True
                    continue
                if staged:
                    await channel.send(encode(Failed("WrongState", "it was dropped", {})))
                    staged = False
                await channel.send(encode(Done()))
        except ChannelClosed:
            pass

    def kill(self) -> None:
        """Ends it at once."""
        self.returncode = -9
        for channel in self._channels:
            channel.close()
        for task in self._tasks:
            task.cancel()
        self._ended.set()

    async def wait(self) -> int:
        """Waits for its end."""
        await self._ended.wait()
        return self.returncode or 0


def _rank(number: int) -> RankWorker:
    steps, their_steps = map(AsyncChannel, socket.socketpair())
    staging, their_staging = map(AsyncChannel, socket.socketpair())
    return RankWorker(number, Process(their_steps, their_staging), steps, staging)


@pytest.fixture
async def group():
    """Three ranks that outlive each other."""
    ranks = RankGroup([_rank(number) for number in range(3)], outlives=True)
    workers, ranks.arenas, ranks.descriptors = list(ranks.workers), [None] * 3, [[], [], []]
    yield ranks
    for worker in workers:
        await worker.kill()


async def _until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - it is about a fake's process
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("aborted", [False, True])
async def test_ranks_that_stage_weights_live(group, aborted):
    """One dies meanwhile: the others are heard out, and none is taken for one that hangs."""
    staging = asyncio.ensure_future(group.stage_same(OPEN, Done))
    await _until(lambda: all(worker.staging.owed for worker in group.workers))
    if aborted:
        group.workers[1].process.hangs = True
        staging.cancel()
        await asyncio.sleep(0.01)
        assert all(worker.staging.owed for worker in group.workers[1:2])
    group.workers[1].process.kill()
    assert await group.settle(PATIENCE_SECONDS) == [1]
    assert [one.owed + one.staging.owed for one in group.workers[::2]] == [0, 0]
    with pytest.raises((RankDied, asyncio.CancelledError)):
        await staging
    group.part([1])
    assert await group.same(Beat(), Done) == [Done(), Done()]
    assert await group.stage_same(DropStaging(), Done) == [Done(), Done()]


async def test_a_rank_hangs_that_somebody_left_waiting(group):
    """Another one dies: nobody bounds the first one's command any more."""
    group.workers[0].process.hangs = True
    asked = asyncio.ensure_future(group.some({0: Passed(Beat(), -1)}, Done))
    await _until(lambda: group.workers[0].owed)
    asked.cancel()
    group.workers[2].process.kill()
    async with asyncio.timeout(5):
        assert await group.settle(PATIENCE_SECONDS) == [0, 2]


async def test_a_command_for_other_members_is_not_sent(group):
    """It waited while who lives was decided: its commands are those of ranks that were."""
    staging = asyncio.ensure_future(group.stage_same(OPEN, Done))
    await _until(lambda: group.workers[2].staging.owed)
    group.workers[2].process.hangs = True

    async def decided():
        group.part(await group.settle(PATIENCE_SECONDS))

    deciding = asyncio.ensure_future(decided())
    await _until(group.ordered.locked)
    late = asyncio.ensure_future(group.same(Step(()), Done))
    await deciding
    with pytest.raises(RanksLost, match="other ranks"):
        await late
    with pytest.raises(RanksLost):
        await staging
    assert await group.same(Beat(), Done) == [Done(), Done()]


async def test_nobody_is_ended_who_only_waits(group):
    """Time counts from its turn on: what is in work before is another's."""
    await group.ordered.acquire()
    asked = asyncio.ensure_future(group.in_time(Beat(), Done, 0.2))
    done, _ = await asyncio.wait([asked], timeout=0.4)
    assert not done
    group.ordered.release()
    assert await asked == [Done(), Done(), Done()]


async def test_who_hangs_is_ended_though_nobody_waits(group):
    """Its caller has left, and its time is over all the same."""
    group.workers[1].process.hangs = True
    asked = asyncio.ensure_future(group.in_time(Beat(), Done, 0.1))
    await _until(lambda: group.workers[1].owed)
    asked.cancel()
    await _until(lambda: group.workers[1].has_ended)
    assert [worker.has_ended for worker in group.workers] == [False, True, False]
