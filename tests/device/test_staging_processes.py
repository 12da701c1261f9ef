"""Ranks that are processes stage weights while they serve, over real sockets."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tiny_llama import Sequence, start_message, write_checkpoint

from engine_service.core.messages import Capture, Captured, Done, LoadDisk, Loaded
from engine_service.core.rank_memory import resident_bytes, staged_bytes
from engine_service.core.ranks import RankGroup
from engine_service.core.step_messages import Sampled, Step
from engine_service.core.update_messages import (
    Applied,
    ApplyUpdate,
    DropStaging,
    FinishStaging,
    OpenStaging,
    Proven,
    ProveStaged,
    StagedFiles,
    StageDisk,
    StageLent,
    UpdateStaged,
)
from engine_service.errors import CheckpointError, RankDied, WrongState
from relay_service.core.manifest import HEADER_BYTES, Manifest

LIMIT_SECONDS = 120


async def _serving(folder: Path) -> tuple[RankGroup, list[Manifest]]:
    group = await RankGroup.spawn(2, 1)
    settings = {"world_size": 2, "collective_timeout_seconds": 60}
    await group.allocate([start_message(folder, rank=rank, **settings) for rank in range(2)])
    loaded = await group.same(LoadDisk(str(folder)), Loaded)
    await group.same(Capture(), Captured)
    return group, [one.manifest for one in loaded]


def _contents(group: RankGroup, manifests: list[Manifest]) -> list[bytes]:
    """Returns the bytes of each rank's arena, read by its descriptor."""
    return [
        os.pread(fds[0], manifest.data_bytes, HEADER_BYTES)
        for fds, manifest in zip(group.descriptors, manifests, strict=True)
    ]


def _staged_bytes(group: RankGroup) -> list[int]:
    """Returns what the kernel says that each rank has staged."""
    return [
        staged_bytes(worker.pid, fds[0])
        for worker, fds in zip(group.workers, group.descriptors, strict=True)
    ]


async def _open(group: RankGroup, serves: list[Manifest]) -> None:
    await group.stage([OpenStaging(serves=one) for one in serves], Done)


async def _tokens(group: RankGroup) -> list[int]:
    sequence = Sequence([1, 2, 3])
    for _ in range(8):
        (sampled, _) = await group.same(Step((sequence.row(),)), Sampled)
        sequence.take(sampled.tokens[0])
    return sequence.output


async def test_ranks_are_updated_while_they_serve(tmp_path):
    """From a folder, after one that was given up, and from lent memory; then a rank dies."""
    first, second = (
        write_checkpoint(tmp_path / str(seed), seed, vocab_size=200, num_hidden_layers=2)
        for seed in (1, 2)
    )
    async with asyncio.timeout(LIMIT_SECONDS):
        group, old = await _serving(first)
        held = _contents(group, old)
        before = await _tokens(group)
        await _given_up(group, old, second)
        assert await _tokens(group) == before
        new = await _from_disk(group, old, second, before)
        after = await _tokens(group)
        assert after != before
        await _refused_and_alive(group, new, tmp_path)
        await _from_memory(group, new, old, held)
        assert await _tokens(group) == before
        await _killed(group)
        await group.stop()


async def _given_up(group: RankGroup, serves: list[Manifest], folder: Path) -> None:
    """A read that would take minutes ends when nobody waits for it any more."""
    await _open(group, serves)
    slow = StageDisk(folder=str(folder), bytes_per_second=10_000)
    reading = asyncio.ensure_future(group.stage_same(slow, StagedFiles))
    while not all(done for done, _ in group.staging_progress):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(WrongState, match="nothing is being staged"):
        await group.stage_same(FinishStaging(), UpdateStaged)
    await group.stage_same(DropStaging(), Done)


async def _from_disk(
    group: RankGroup, serves: list[Manifest], folder: Path, before: list[int]
) -> list[Manifest]:
    """Steps go on, with the old weights, until these are applied."""
    await _open(group, serves)
    read = StageDisk(folder=str(folder), bytes_per_second=1 << 20)
    staging = asyncio.ensure_future(group.stage_same(read, StagedFiles))
    served = 0
    while not staging.done():
        assert await _tokens(group) == before
        served += 1
    assert served > 0
    await staging
    total = group.staging_progress
    assert all(done == whole > 0 for done, whole in total)
    staged = await group.stage_same(FinishStaging(), UpdateStaged)
    measured = _staged_bytes(group)
    assert all(0 < one.bytes_changed <= found for one, found in zip(staged, measured, strict=True))
    proofs = asyncio.ensure_future(group.stage_same(ProveStaged(), Proven))
    while not proofs.done():
        assert await _tokens(group) == before
    assert len({one.probe for one in proofs.result()}) == 1
    applied = await group.same(ApplyUpdate(), Applied)
    assert [one.bytes_copied for one in applied] == [one.bytes_changed for one in staged]
    async with asyncio.timeout(LIMIT_SECONDS):
        while any(_staged_bytes(group)):  # noqa: ASYNC110 - nobody waits for it to be given back
            await asyncio.sleep(0.01)
    return [one.manifest for one in staged]


async def _refused_and_alive(group: RankGroup, serves: list[Manifest], empty: Path) -> None:
    """An error while staging, or an update that was not staged, ends nobody."""
    await _open(group, serves)
    with pytest.raises(CheckpointError):
        await group.stage_same(StageDisk(folder=str(empty)), StagedFiles)
    with pytest.raises(WrongState):
        await group.same(ApplyUpdate(), Applied)


async def _from_memory(
    group: RankGroup, serves: list[Manifest], wanted: list[Manifest], held: list[bytes]
) -> None:
    """Blocks that were served before are written into lent memory, as a relay does."""
    await _open(group, serves)
    lent = await group.lend()
    for rank, (fd,) in enumerate(lent):
        for index in range(wanted[rank].block_count):
            block = wanted[rank].block(index)
            data = held[rank][block.offset : block.offset + block.nbytes]
            os.pwrite(fd, data, HEADER_BYTES + block.offset)
        os.close(fd)
    assert all(
        found >= manifest.data_bytes
        for found, manifest in zip(_staged_bytes(group), wanted, strict=True)
    )
    await group.stage([StageLent(one) for one in wanted], Done)
    staged = await group.stage_same(FinishStaging(), UpdateStaged)
    assert [one.manifest for one in staged] == wanted
    await group.same(ApplyUpdate(), Applied)


async def _killed(group: RankGroup) -> None:
    assert all(resident_bytes(worker.pid) > 1 << 20 for worker in group.workers)
    os.kill(group.workers[1].pid, signal.SIGKILL)
    with pytest.raises(RankDied):
        await group.stage_same(DropStaging(), Done)
    with pytest.raises(RankDied):
        await group.same(Step((Sequence([1]).row(),)), Sampled)
    assert "rank 1" in str(await group.died())
    gone = group.workers[1].pid
    assert (resident_bytes(gone), staged_bytes(gone, group.descriptors[1][0])) == (0, 0)
