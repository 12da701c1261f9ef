"""Rank processes of which one is killed or hangs: the others answer, and meet without it."""

import asyncio
import os
import signal

import pytest
from oracles import make
from tiny_llama import Sequence, start_message

from engine_service.core.expert_map import ExpertMap
from engine_service.core.member_messages import Beat, Place, Placed, Rejoin
from engine_service.core.messages import Allocated, Capture, Captured, Done, LoadDisk, Loaded
from engine_service.core.rank_worker import spawn
from engine_service.core.step_messages import Sampled, Step
from engine_service.errors import CollectiveFailed, RankDied

RANKS, EXPERTS = 3, 8
LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a dense layer and two with eight experts each, and shared ones."""
    return make("dots1", tmp_path_factory.mktemp("dots1"), num_key_value_heads=4).folder


async def _all(workers, command, kind):
    """Gives all workers a command, or each its own; returns answers, errors too."""
    commands = command if isinstance(command, list) else [command] * len(workers)
    for worker, own in zip(workers, commands, strict=True):
        await worker.send(own)
    return await asyncio.gather(*(one.reply(kind) for one in workers), return_exceptions=True)


async def _tokens(workers, count=8):
    sequence = Sequence([3, 1, 4, 1, 5])
    for _ in range(count):
        answers = await _all(workers, Step((sequence.row(),)), Sampled)
        (tokens,) = {one.tokens for one in answers}
        sequence.take(tokens[0])
    return sequence.output


@pytest.mark.parametrize(
    ("end", "timeout"),
    [
        pytest.param(signal.SIGKILL, 60, id="killed", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 3, id="hung", marks=pytest.mark.full),
    ],
)
async def test_the_others_go_on(folder, end, timeout):
    """They answer what failed, fail at once until they meet anew, and compute the same tokens."""
    meeting, workers = os.memfd_create("tests"), []
    settings = {
        "world_size": RANKS, "expert_parallel_size": RANKS, "redundant_experts": 2 * EXPERTS,
        "outlives_peers": True, "collective_timeout_seconds": timeout,
    }  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            workers = [await spawn(rank, 1, (meeting,)) for rank in range(RANKS)]
            starts = [start_message(folder, rank=rank, **settings) for rank in range(RANKS)]
            await _all(workers, starts, Allocated)
            await _all(workers, LoadDisk(str(folder)), Loaded)
            await _all(workers, Capture(), Captured)
            expected = await _tokens(workers)
            lost, *left = workers
            lost.process.send_signal(end)
            step = Step((Sequence([1, 2, 3], 8).row(),))
            answers = await _all(left, step, Sampled)
            assert [type(one) for one in answers] == [CollectiveFailed] * len(left), answers
            answers = await _all(left, step, Sampled)
            assert all("has not met them anew" in str(one) for one in answers), answers
            assert await _all(left, Beat(), Done) == [Done()] * len(left)
            joining = [Rejoin("two", rank, len(left)) for rank in range(len(left))]
            assert await _all(left, joining, Done) == [Done()] * len(left)
            whole = ExpertMap.linear(EXPERTS, [1, 2], RANKS, 2 * EXPERTS)
            placing = [Place(whole.without([0]), rank) for rank in range(len(left))]
            placed = await _all(left, placing, Placed)
            assert [one.manifest.rank for one in placed] == [0, 1]
            await _all(left, Capture(), Captured)
            assert await _tokens(left) == expected
            await left[1].send(Place(whole, 0))
            with pytest.raises(Exception, match="expert map"):
                await left[1].reply(Placed)
            assert await left[1].process.wait() == 1
    finally:
        for worker in workers:
            if worker.process.returncode is None:
                worker.process.kill()
            await worker.stop()
        os.close(meeting)


async def test_a_rank_that_does_not_outlive_others_ends(folder):
    """As it does unless it was told otherwise."""
    meeting, workers = os.memfd_create("tests"), []
    settings = {"world_size": 2, "expert_parallel_size": 2, "collective_timeout_seconds": 60}
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            workers = [await spawn(rank, 1, (meeting,)) for rank in range(2)]
            starts = [start_message(folder, rank=rank, **settings) for rank in range(2)]
            await _all(workers, starts, Allocated)
            await _all(workers, LoadDisk(str(folder)), Loaded)
            workers[0].process.kill()
            await workers[1].send(Step((Sequence([1, 2, 3]).row(),)))
            with pytest.raises(RankDied):
                await workers[1].reply(Sampled)
            assert await workers[1].process.wait() == 1
    finally:
        for worker in workers:
            if worker.process.returncode is None:
                worker.process.kill()
            await worker.stop()
        os.close(meeting)
