"""What is staged goes to all ranks in an order of its own, and ends no group: over fake ranks."""

import asyncio
import os
from pathlib import Path

import pytest

from engine_service.core.messages import Command, Done, Reply
from engine_service.core.ranks import RankGroup
from engine_service.core.step_messages import Sampled, Step
from engine_service.core.update_messages import DropStaging, LendStaging, Lent, OpenStaging
from engine_service.errors import CheckpointError, CollectiveFailed, RankDied, WrongState
from relay_service.core.manifest import Manifest

OPEN = OpenStaging(serves=Manifest(0, 0, ()))


class FakeStream:
    """Answers what is put into it, in that order."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.answers: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self.progress = (0, 0)
        self.channel = self
        self.descriptors: list[int] = []

    async def send(self, command: Command) -> None:
        """Takes a command."""
        self.commands.append(command)

    async def reply(self, _kind: type):
        """Waits for the next answer."""
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take_descriptors(self, count: int) -> list[int]:
        """Hands out what came along."""
        taken, self.descriptors = self.descriptors[:count], self.descriptors[count:]
        return taken


class FakeRank(FakeStream):
    """A rank with both of its streams."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = FakeStream()


def _group(ranks: int = 2) -> tuple[RankGroup, list[FakeStream]]:
    workers = [FakeRank() for _ in range(ranks)]
    return RankGroup(workers), [worker.staging for worker in workers]


async def _until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - fakes answer within the loop
            await asyncio.sleep(0)


async def test_steps_go_on_while_something_is_staged():
    """A command that takes long holds up no step, but the next one of its kind."""
    group, streams = _group()
    first = asyncio.ensure_future(group.stage_same(OPEN, Done))
    second = asyncio.ensure_future(group.stage_same(DropStaging(), Done))
    await _until(lambda: all(stream.commands for stream in streams))
    for worker in group.workers:
        worker.answers.put_nowait(Sampled((1,)))
    assert await group.same(Step(()), Sampled) == [Sampled((1,))] * 2
    assert not first.done()
    assert [stream.commands for stream in streams] == [[OPEN]] * 2
    streams[1].progress = (3, 7)
    assert group.staging_progress == [(0, 0), (3, 7)]
    for stream in streams:
        stream.answers.put_nowait(Done())
        stream.answers.put_nowait(Done())
    assert await first == await second == [Done(), Done()]
    assert [stream.commands for stream in streams] == [[OPEN, DropStaging()]] * 2


async def test_an_error_waits_for_all_and_ends_no_group():
    """Also where it is a collective's: the update ends, the ranks don't."""
    group, streams = _group()
    for error in (CheckpointError("broken"), CollectiveFailed("nobody came")):
        asked = asyncio.ensure_future(group.stage_same(OPEN, Done))
        streams[0].answers.put_nowait(error)
        await _until(streams[0].answers.empty)
        for _ in range(100):  # whatever could follow from it has followed
            await asyncio.sleep(0)
        assert not asked.done()
        streams[1].answers.put_nowait(Done())
        with pytest.raises(type(error)):
            await asked
    for worker, stream in zip(group.workers, streams, strict=True):
        worker.answers.put_nowait(Sampled((1,)))
        stream.answers.put_nowait(Done())
    assert await group.same(Step(()), Sampled)
    assert await group.stage_same(OPEN, Done)


@pytest.mark.parametrize("first", ["steps", "staging"])
async def test_a_rank_that_dies_fails_both_streams(first):
    """At once, while another rank never answers; nobody gets a command afterwards."""
    group, streams = _group()
    dying = group.workers[1] if first == "steps" else streams[1]
    dying.answers.put_nowait(RankDied("rank 1 has died"))
    ask = {
        "steps": lambda: group.same(Step(()), Sampled),
        "staging": lambda: group.stage_same(OPEN, Done),
    }
    async with asyncio.timeout(10):
        with pytest.raises(RankDied, match="rank 1"):
            await ask.pop(first)()
        sent = [len(one.commands) for one in (*group.workers, *streams)]
        with pytest.raises(RankDied, match="rank 1"):
            await ask.popitem()[1]()
    assert [len(one.commands) for one in (*group.workers, *streams)] == sent


async def test_a_caller_who_goes_gives_up():
    """Ranks are told to drop it; the next command waits until they have answered for both."""
    group, streams = _group()
    asked = asyncio.ensure_future(group.stage_same(OPEN, Done))
    await _until(lambda: all(stream.commands for stream in streams))
    asked.cancel()
    await _until(lambda: all(stream.commands == [OPEN, DropStaging()] for stream in streams))
    following = asyncio.ensure_future(group.stage_same(OPEN, Done))
    for stream in streams:
        stream.answers.put_nowait(WrongState("staging was given up"))
        stream.answers.put_nowait(Done())
    await _until(lambda: all(len(stream.commands) == 3 for stream in streams))
    for stream in streams:
        stream.answers.put_nowait(Done())
    assert await following == [Done(), Done()]


@pytest.mark.parametrize("keep", [True, False])
async def test_memory_that_nobody_takes_is_closed(keep):
    """Descriptors belong to the caller; one who has gone owns none."""
    group, streams = _group()
    for stream in streams:
        stream.descriptors = [os.memfd_create("lent")]
    numbers = [fd for stream in streams for fd in stream.descriptors]
    asked = asyncio.ensure_future(group.lend())
    await _until(lambda: all(one.commands == [LendStaging()] for one in streams))
    if not keep:
        asked.cancel()
    for stream in streams:
        stream.answers.put_nowait(Lent(1))
    if keep:
        assert await asked == [[number] for number in numbers]
        for number in numbers:
            os.close(number)
    else:
        await _until(lambda: not any(Path(f"/proc/self/fd/{n}").exists() for n in numbers))
