"""Real workers over gloo: several ranks compute what one computes, or say why they don't."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from oracles import make
from tiny_llama import Sequence, start_message, write_checkpoint

from engine_service.core.messages import (
    Capture,
    Captured,
    CheckProbe,
    Done,
    LoadDisk,
    Loaded,
    Recorded,
    RecordProbe,
)
from engine_service.core.ranks import RankGroup
from engine_service.core.step_messages import Sampled, Step
from engine_service.errors import (
    CheckpointError,
    CollectiveFailed,
    InvalidRequest,
    ProbeMismatch,
    RankDied,
)

STEPS = 16
LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint that two ranks can hold; one key-value head, so both hold it."""
    return write_checkpoint(
        tmp_path_factory.mktemp("even"), vocab_size=200, num_key_value_heads=1,
        tie_word_embeddings=False,
    )  # fmt: skip


async def _started(
    folder: Path, ranks: int, timeout: float = 60, weight_format: str = "plain"
) -> RankGroup:
    group = await RankGroup.spawn(ranks, 1)
    settings = {
        "world_size": ranks, "collective_timeout_seconds": timeout, "weight_format": weight_format,
    }  # fmt: skip
    await group.allocate([start_message(folder, rank=rank, **settings) for rank in range(ranks)])
    return group


async def _serving(folder: Path, ranks: int) -> RankGroup:
    group = await _started(folder, ranks)
    await group.same(LoadDisk(str(folder)), Loaded)
    await group.same(Capture(), Captured)
    return group


async def _tokens(group: RankGroup) -> list[list[int]]:
    """Prefills one sequence while another decodes, then decodes both together."""
    sequences = [Sequence([1, 2, 3]), Sequence(range(20), first_block=8)]
    for step in range(STEPS):
        running = sequences if step else sequences[:1]
        sampled = await group.step(tuple(one.row() for one in running))
        for sequence, token in zip(running, sampled.tokens, strict=True):
            sequence.take(token)
    return [sequence.output for sequence in sequences]


def _open_files() -> list[str]:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:  # the one that listed them
            continue
    return [link for link in links if "memfd:" in link]


async def test_two_ranks_compute_what_one_computes(folder):
    """Same tokens, eager and replayed, same probe on both ranks, and nothing stays open."""
    before = _open_files()
    async with asyncio.timeout(LIMIT_SECONDS):
        alone = await _serving(folder, 1)
        together = await _serving(folder, 2)
        recorded = (await alone.same(RecordProbe(), Recorded))[0].probe
        await together.same(CheckProbe(recorded), Done)
        assert len({reply.probe for reply in await together.same(RecordProbe(), Recorded)}) == 1
        assert await _tokens(together) == await _tokens(alone)
        assert {arena.facts for arena in together.arenas} == {alone.arenas[0].facts}
        assert [arena.manifest.rank for arena in together.arenas] == [0, 1]
        await _refusal_leaves_them_in_step(together)
        pids = [worker.pid for worker in together.workers]
        await asyncio.gather(alone.stop(), together.stop())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert _open_files() == before


async def test_two_ranks_share_every_expert(tmp_path):
    """Each holds rows of all of them; experts of a layer are one collective, shared ones too."""
    folder = make("qwen2-moe", tmp_path).folder
    async with asyncio.timeout(LIMIT_SECONDS):
        alone, together = await _serving(folder, 1), await _serving(folder, 2)
        recorded = (await alone.same(RecordProbe(), Recorded))[0].probe
        await together.same(CheckProbe(recorded), Done)
        assert await _tokens(together) == await _tokens(alone)
        await asyncio.gather(alone.stop(), together.stop())


async def _refusal_leaves_them_in_step(group: RankGroup) -> None:
    """A bad row is refused by every rank at the same place, after the first row was computed."""
    expected = await group.step((Sequence([5, 6, 7]).row(),))
    with pytest.raises(InvalidRequest):
        await group.step((Sequence([5, 6, 7]).row(), Sequence([999], first_block=8).row()))
    assert await group.step((Sequence([5, 6, 7]).row(),)) == expected


async def test_two_ranks_serve_a_quantised_model(folder):
    """Each holds its part in blocks of its own; both compute the same, eager and replayed."""
    async with asyncio.timeout(LIMIT_SECONDS):
        group = await _started(folder, 2, weight_format="fp8")
        await group.same(LoadDisk(str(folder)), Loaded)
        await group.same(Capture(), Captured)
        recorded = {reply.probe for reply in await group.same(RecordProbe(), Recorded)}
        assert len(recorded) == 1
        await group.same(CheckProbe(recorded.pop()), Done)
        assert len(await _tokens(group)) == 2
        await group.stop()


async def test_a_killed_rank_ends_the_others_at_once(folder):
    """The step fails long before the timeout, and the one that was killed is named."""
    async with asyncio.timeout(LIMIT_SECONDS):
        group = await _started(folder, 2, timeout=600)
        await group.same(LoadDisk(str(folder)), Loaded)
        os.kill(group.workers[1].pid, signal.SIGKILL)
        with pytest.raises(RankDied):
            await group.step((Sequence([1, 2, 3]).row(),))
        assert "rank 1" in str(await group.died())
        with pytest.raises(RankDied):  # and no command reaches what is left
            await group.same(LoadDisk(str(folder)), Loaded)
        await group.stop()


async def test_a_rank_that_hangs_costs_the_timeout(folder):
    """The others give up when the time is over, say so, and end."""
    async with asyncio.timeout(LIMIT_SECONDS):
        group = await _started(folder, 2, timeout=3)
        await group.same(LoadDisk(str(folder)), Loaded)
        os.kill(group.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(CollectiveFailed, match=r"rank 0: another rank .*Timed out"):
            await group.step((Sequence([1, 2, 3]).row(),))
        assert "Timed out" in str(await group.died())
        await group.stop()


async def test_a_rank_that_never_starts_is_missed(folder):
    """The others wait for it until the time is over, and say for how long."""
    async with asyncio.timeout(LIMIT_SECONDS):
        group = await RankGroup.spawn(2, 1)
        settings = {"world_size": 2, "collective_timeout_seconds": 3}
        starts = [start_message(folder, rank=rank, **settings) for rank in range(2)]
        os.kill(group.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(RankDied) as caught:
            await group.allocate(starts)
        assert "rank 0 of 2 did not meet the others within 3 s" in str(caught.value)
        await group.stop()


async def test_a_command_that_fails_on_one_rank_alone_is_the_end(folder):
    """Its error is the one that is told; the other rank missed it, and neither goes on."""
    async with asyncio.timeout(LIMIT_SECONDS):
        group = await _started(folder, 2, timeout=3)
        await group.same(LoadDisk(str(folder)), Loaded)
        recorded = (await group.same(RecordProbe(), Recorded))[0].probe
        with pytest.raises(ProbeMismatch, match="cannot be read"):
            await group.all([CheckProbe(recorded), CheckProbe(b"")], Done)
        with pytest.raises(CollectiveFailed, match="rank 0"):
            await group.step((Sequence([1, 2, 3]).row(),))
        assert "rank 0" in str(await group.died())
        await group.stop()


async def test_a_checkpoint_that_breaks_for_one_rank_is_its_error(folder, tmp_path):
    """Loading computes nothing together: the others load, and stay in step."""
    async with asyncio.timeout(LIMIT_SECONDS):
        group = await _started(folder, 2)
        loads = [LoadDisk(str(folder)), LoadDisk(str(tmp_path))]
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            await group.all(loads, Loaded)
        # The first rank's arena serves by now; only the second one still needs its own.
        await group.workers[1].send(loads[0])
        await group.workers[1].reply(Loaded)
        step = Step((Sequence([1, 2, 3]).row(),))
        assert len({reply.tokens for reply in await group.same(step, Sampled)}) == 1
        await group.stop()
