"""One order for all ranks, and one error out of many: over fake workers."""

import asyncio

import pytest
from fakes import lay_out_bytes

from engine_service.core.messages import Allocated, Command, Done
from engine_service.core.ranks import RankGroup
from engine_service.core.step_messages import Sampled, Step
from engine_service.errors import CheckpointError, CollectiveFailed, RankDied, WrongState


class FakeWorker:
    """Answers every command with what it was given; nothing means never."""

    def __init__(self, answer: Done | Sampled | Exception | None) -> None:
        self.answer = answer
        self.process = self
        self.killed = False
        self._ended = asyncio.Event()
        self.commands: list[Command] = []

    def kill(self) -> None:
        """Ends its process, which it is itself."""
        self.killed = True
        self._ended.set()

    async def send(self, command: Command) -> None:
        """Takes a command."""
        self.commands.append(command)

    async def reply(self, _kind: type):
        """Answers it."""
        if self.answer is None:
            await self._ended.wait()
            raise RankDied("its stream has ended")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def _group(*answers) -> RankGroup:
    return RankGroup([FakeWorker(answer) for answer in answers])


async def test_tokens_that_differ_are_the_end():
    """No token is served that the ranks don't agree on."""
    assert await _group(Sampled((1, 2)), Sampled((1, 2))).step(()) == Sampled((1, 2))
    group = _group(Sampled((1, 2)), Sampled((1, 3)))
    with pytest.raises(RankDied, match="different tokens"):
        await group.step(())
    assert all(worker.killed for worker in group.workers)


async def test_a_step_may_tell_of_other_pages():
    """Of the rank whose arena they back; from then on that is what is said of it."""
    group = _group(Sampled((1,)), Sampled((1,), page_kind="huge (4 bytes)"))
    arena = Allocated(lay_out_bytes([64]), (), 8, 4096, "4 KiB", 0)
    group.arenas = [arena, arena]
    await group.step(())
    assert [one.page_kind for one in group.arenas] == ["4 KiB", "huge (4 bytes)"]


async def test_a_rank_that_hangs_is_the_end():
    """Of all: what some have done and others have not is nothing to go on with."""
    assert await _group(Done(), Done()).in_time(Step(()), Done, 60) == [Done(), Done()]
    group = _group(Done(), None)
    with pytest.raises(RankDied, match="Step took a rank longer than"):
        await group.in_time(Step(()), Done, 0.01)
    assert all(worker.killed for worker in group.workers)
    with pytest.raises(RankDied, match="longer than"):
        await group.step(())


@pytest.mark.parametrize("first", [0, 1])
async def test_the_cause_is_told_and_not_that_others_missed_it(first):
    """A rank that waited in vain says nothing about why."""
    answers = [CheckpointError("broken"), CollectiveFailed("nobody came")]
    with pytest.raises(CheckpointError, match="broken"):
        await _group(answers[first], answers[1 - first]).same(Step(()), Sampled)


@pytest.mark.parametrize("first", [0, 1])
async def test_a_death_comes_before_other_errors(first):
    """A step that failed on one rank and ended another is to be done again, not to be told of."""
    answers = [WrongState("not ready"), RankDied("rank 1 has died")]
    with pytest.raises(RankDied, match="has died"):
        await _group(answers[first], answers[1 - first]).same(Step(()), Sampled)


async def test_a_dead_rank_is_told_while_another_never_answers():
    """And from then on no rank gets a command."""
    group = _group(None, RankDied("rank 1 has died"))
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(RankDied, match="rank 1"):
                await group.step(())
    assert [len(worker.commands) for worker in group.workers] == [1, 1]


async def test_an_error_of_one_rank_waits_for_the_others():
    """The stream of each rank is in order again when the caller hears of it."""
    group = _group(CheckpointError("broken"), None)
    asked = asyncio.ensure_future(group.same(Step(()), Sampled))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asked.done()
    asked.cancel()
