"""Whatever ends an update half-way: the old weights serve, exactly, or the instance has failed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disturbing import ends, failed, no_files, replace, stopped, tell, truncate
from stage import Stage, answer, eventually, request, status_of
from update_scene import RATE, UpdateScene, disk

from clients.engine import EngineClient
from clients.errors import ClientError
from engine_service.core.update_request import Phase
from seedrelay.v1 import engine_pb2

PHASES = [phase for phase in Phase if phase not in (Phase.WAITING, Phase.READERS, Phase.DONE)]
"""All in which an update can be stopped: another one that is added fails in `scene.at`.

Who waits for readers stands in `tests/rpc/test_leases_and_updates.py`."""
COMMITS = (Phase.PAUSING, Phase.COPYING)
"""Those that a client cannot end any more by leaving."""
RELAYED = {"relay": {"options": {"source_instance": "b"}}}
ERRORS = {"UNAVAILABLE", "FAILED_PRECONDITION", "CANCELLED"}
"""What a client may be told whose engine goes."""


def only(*phases: Phase) -> list[object]:
    """Returns all phases as parameters, of which `make test` takes these."""
    return [pytest.param(one, marks=() if one in phases else pytest.mark.full) for one in PHASES]


@pytest.fixture(scope="module")
def whole_scene(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[UpdateScene]:
    """An engine, a source on another host, and a relay for each."""
    wish = {"hidden_size": 128, "layers": 4, "vocab_size": 4096, "tied": False}
    models = {
        name: make_model(f"update-{name}", seed, **wish) for name, seed in (("a", 0), ("b", 7))
    }
    stage = Stage(tmp_path_factory.mktemp("faults"))
    try:
        scene = UpdateScene(stage, models)
        asyncio.run(scene.ready())
        yield scene
    finally:
        stage.close()


@pytest.fixture
async def scene(whole_scene: UpdateScene) -> UpdateScene:
    """The scene, with an engine that serves."""
    await whole_scene.up()
    return whole_scene


async def _disturbed(scene: UpdateScene, source: dict, disturb: Callable[[], None]) -> None:
    """Updates, and disturbs that once while it is staged."""
    disturbed = False
    async with EngineClient(scene.engine.address) as client:
        request = engine_pb2.UpdateWeightsRequest(update=scene.asked(source))
        async for message in client.update(request):
            if message.progress.bytes_done > 0 and not disturbed:
                assert message.progress.phase == Phase.STAGING, "it was staged too soon"
                disturb()
                disturbed = True


# Clients


@pytest.mark.parametrize("phase", only(Phase.STAGING, Phase.COPYING))
async def test_a_client_is_killed(scene: UpdateScene, phase: Phase) -> None:
    """Before the commit nothing changes; a commit that has begun comes to its end."""
    async with scene.at(phase) as (updater, version):
        updater.kill()
        if phase is Phase.COPYING:
            os.kill((await scene.ranks())[1], signal.SIGCONT)
    if phase in COMMITS:
        await scene.as_updated(version)
    else:
        await scene.as_before()


async def test_a_client_is_killed_in_a_push(scene: UpdateScene) -> None:
    """Half of the tensors have come: they are dropped, and another client begins at once."""
    pushed = scene.asked({"push": {}})
    with scene.client(pushed, pushes=str(scene.models[scene.other])) as updater:
        await scene.until(Phase.STAGING, updater)
        updater.kill()
    await scene.as_before()


async def test_a_client_is_killed_in_place(scene: UpdateScene) -> None:
    """Layer by layer the old weights are lost, as was said beforehand: it is FAILED, and ends."""
    async with (
        scene.at(Phase.STAGING, staging="STAGING_LAYERWISE") as (updater, version),
        EngineClient(scene.engine.address) as client,
    ):
        failing = asyncio.ensure_future(failed(client))
        updater.kill()
        assert f"an update to {version} failed half-way" in await failing
        with pytest.raises(ClientError) as refused:
            _ = [one async for one in client.generate(request())]
        assert refused.value.code == "UNAVAILABLE"
    assert await asyncio.to_thread(scene.engine.wait) == 1


# Sources


async def test_a_source_relay_is_killed(scene: UpdateScene) -> None:
    """No other source is there: the update fails and says so."""
    if scene.serves == "b":
        await scene.as_before()
    with pytest.raises(ClientError) as failed:
        await _disturbed(scene, RELAYED, scene.far_relay.kill)
    assert failed.value.code == "UNAVAILABLE"
    await scene.restore_far()
    await scene.as_before()


@pytest.mark.parametrize("change", [truncate, pytest.param(replace, marks=pytest.mark.full)])
async def test_a_file_changes_while_it_is_read(
    scene: UpdateScene, change: Callable[[Path], None]
) -> None:
    """It is refused by name."""
    copy = scene.models["a"].parent / "changing"
    shutil.copytree(scene.models[scene.other], copy)
    try:
        with pytest.raises(ClientError, match=r"model\.safetensors") as refused:
            await _disturbed(scene, disk(copy, RATE), lambda: change(copy / "model.safetensors"))
    finally:
        shutil.rmtree(copy)
    assert refused.value.code == "INVALID_ARGUMENT"
    await scene.as_before()


# Ranks


@pytest.mark.parametrize("phase", only(Phase.STAGING)[:2])
async def test_a_rank_hangs(scene: UpdateScene, phase: Phase) -> None:
    """The caller is told at its deadline; once the rank is back, all is as it was."""
    pid = (await scene.ranks())[1]
    async with scene.at(phase, seconds=5) as (updater, _):
        with stopped(pid):
            assert await ends(updater) == "DEADLINE_EXCEEDED"
    await scene.as_before()


@pytest.mark.full
async def test_a_rank_hangs_while_it_computes(scene: UpdateScene) -> None:
    """The others miss it: the instance is FAILED, and starts again with its first weights."""
    status = await status_of(scene.engine)
    async with EngineClient(scene.engine.address) as client:
        running = client.generate(request(max_tokens=1800))
        await anext(running)
        async with scene.at(Phase.STAGING) as (updater, _):
            failing = asyncio.ensure_future(failed(client))
            os.kill(status.ranks[1].pid, signal.SIGSTOP)  # it is killed by who gives it up
            assert "did not" in await failing
            assert await ends(updater) in ERRORS
        with pytest.raises(ClientError):
            _ = [one async for one in running]
    await scene.again(status.generation)
    await scene.as_before()


async def test_no_room_on_a_rank(scene: UpdateScene) -> None:
    """For the memory that it should lend a relay: the others give theirs back."""
    if scene.serves == "b":
        await scene.as_before()
    pid = (await scene.ranks())[1]
    with no_files(pid), pytest.raises(ClientError, match=r"memory|room") as refused:
        await _disturbed(scene, RELAYED, lambda: None)
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    await scene.as_before()


@pytest.mark.full
async def test_a_rank_is_late(scene: UpdateScene) -> None:
    """Five updates, with a rank that lags in turn: who is told of one finds it on all ranks."""
    for number in range(5):
        pid = (await scene.ranks())[number % 2]
        pushed = scene.asked({"push": {}}, pause_mode="PAUSE_MODE_KEEP")
        with scene.client(pushed, pushes=str(scene.models[scene.other])) as updater:
            await scene.until(Phase.STAGING, updater)
            with stopped(pid):
                tell(updater)
                await asyncio.sleep(0.3)
            await scene.until(Phase.STAGED, updater)
            with stopped(pid):
                tell(updater)
                await asyncio.sleep(0.3)
            assert await ends(updater) == pushed.weight_version
        await scene.as_updated(pushed.weight_version)


@pytest.mark.parametrize("phase", only(Phase.COPYING))
async def test_a_rank_is_killed(scene: UpdateScene, phase: Phase) -> None:
    """The instance is FAILED with the reason, and starts again with its first weights."""
    status = await status_of(scene.engine)
    async with scene.at(phase) as (updater, _), EngineClient(scene.engine.address) as client:
        failing = asyncio.ensure_future(failed(client))
        asked = asyncio.ensure_future(answer(scene.engine))
        if phase in COMMITS:
            await eventually(lambda: _waits(client))
        os.kill(status.ranks[1].pid, signal.SIGKILL)
        if phase is Phase.STAGED:
            tell(updater)
        assert "rank 1" in await failing
        assert await ends(updater) in ERRORS
        (said,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(said, list):
            assert phase not in COMMITS
            assert said == scene.says[scene.serves][1][: len(said)]
        else:
            assert isinstance(said, ClientError)
            assert said.code == "UNAVAILABLE"
    await scene.again(status.generation)
    await scene.as_before()


async def _waits(client: EngineClient) -> bool:
    return (await client.status()).waiting_at_gate == 1


# The engine


@pytest.mark.parametrize("phase", only(Phase.STAGING))
async def test_an_engine_is_told_to_end(scene: UpdateScene, phase: Phase) -> None:
    """It ends, kindly and soon, whatever its update waits for."""
    ranks = await scene.ranks()
    async with scene.at(phase) as (updater, version):
        os.kill(scene.engine.pid, signal.SIGTERM)
        if phase is Phase.COPYING:
            os.kill(ranks[1], signal.SIGCONT)
        if phase is Phase.STAGED:
            tell(updater)
        said = await ends(updater)
    assert await asyncio.to_thread(scene.engine.wait) == 0, scene.engine.log_tail()
    assert said in ({version} if phase is Phase.COPYING else ERRORS)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
