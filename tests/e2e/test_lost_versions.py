"""Ranks are lost around an update: what comes back is of the version that serves, or nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from losses import (
    HELD,
    PROMPTS,
    WHOLE_SECONDS,
    Elastic,
    asked,
    digests,
    experts_model,
    minimum,
    other_weights,
    pulled,
)
from stage import READY, Stage, answer, reach, refusal, seedrelay, status_of

from clients.engine import EngineClient
from clients.errors import CallFailed
from engine_service.core.update_request import Phase
from seedrelay.v1 import engine_pb2, weights_pb2

MOVED = [[6, 1], [4, 3], [0, 7], [2, 5]]
"""Where experts lie that were moved before the update."""


async def test_the_version_that_serves_is_recovered(stage: Stage, tmp_path: Path) -> None:
    """S66, S67: never the one of the start, which the model folder still holds."""
    oracle = experts_model(tmp_path / "model")
    update = other_weights(oracle, tmp_path / "update")
    scene = Elastic(stage, oracle, "--recovery-deadline", "8")
    await scene.ready()
    source = stage.engine(
        update.folder, "--ep", "2", "--dtype", "float32", "--relay", scene.relay.address,
        "--instance-name", "updated",
    )  # fmt: skip
    groups = [engine_pb2.GroupExperts(experts=held) for held in MOVED]
    layers = [engine_pb2.LayerExperts(layer=n, groups=groups) for n in (1, 2)]
    async with EngineClient(scene.engine.address) as client:
        await client.set_expert_map(layers)
    done = await asyncio.to_thread(
        seedrelay, "update", "--engine", scene.engine.address, "--version", "v1",
        "--from", f"disk:{update.folder}",
    )  # fmt: skip
    assert done.status == 0, done.err
    await reach(source)
    before, wanted = await scene.found(), asked(PROMPTS[0], 24)
    async with EngineClient(source.address) as client:
        assert digests(await client.expert_map()) == digests(before), "an expert of before was left"
    expected = update.greedy(PROMPTS[0], 24)
    assert await answer(scene.engine, wanted) == expected != oracle.greedy(PROMPTS[0], 24)

    await scene.lose(2, by=signal.SIGKILL)
    after = await scene.whole()
    assert set(pulled(after.last_report)) == minimum(before, [2])
    assert {one.source for one in after.last_report.pulled} == {"relay:updated"}
    assert digests(after) == digests(before)
    assert await answer(scene.engine, wanted) == expected

    assert source.stop() == 0
    await scene.lose(1, by=signal.SIGKILL)
    assert (await status_of(scene.engine)).membership.state == HELD
    waiting = asyncio.create_task(refusal(scene.engine, wanted))
    assert (await waiting).code == "UNAVAILABLE"
    status = await status_of(scene.engine)
    assert status.state == weights_pb2.INSTANCE_STATE_FAILED
    assert "did not come back in time" in status.reason
    assert f"disk:{oracle.folder}: it holds other weights" in status.reason
    processes = scene.engine.processes()
    assert scene.engine.wait() == 1
    assert not [one for one in processes if Path(f"/proc/{one}").exists()]


async def test_a_rank_is_lost_in_a_commit(stage: Stage, tmp_path: Path) -> None:
    """S17: nobody can say what the others hold by then: the instance fails, and says so."""
    oracle = experts_model(tmp_path / "model")
    update = other_weights(oracle, tmp_path / "update")
    scene = Elastic(stage, oracle)
    await scene.ready()
    wanted = engine_pb2.WeightUpdate(
        weight_version="v1", source={"disk": {"folder": str(update.folder)}}
    )
    async with EngineClient(scene.engine.address) as client:
        begun = await client.begin_update(engine_pb2.BeginWeightUpdateRequest(update=wanted))
        async for _ in client.stage(begun.session):
            pass
        status = await status_of(scene.engine)
        assert (status.state, status.update.phase) == (READY, Phase.STAGED)
        processes = scene.engine.processes()
        os.kill(status.membership.members[2].pid, signal.SIGSTOP)
        with pytest.raises(CallFailed) as failed:
            await client.commit_update(begun.session, WHOLE_SECONDS)
    assert failed.value.code == "UNAVAILABLE"
    assert await asyncio.to_thread(scene.engine.wait) == 1
    assert "an update to v1 failed half-way" in scene.engine.log_tail()
    assert not [one for one in processes if Path(f"/proc/{one}").exists()]
