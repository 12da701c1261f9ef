"""Weights change while nothing runs, and every answer says which made it."""

import asyncio
import dataclasses

import pytest
from pausing_scene import Scene, by_name, played
from virtual_time import settled

from engine_service.core.pause_modes import PauseMode
from engine_service.core.request import Finish
from engine_service.errors import EngineError, NotReady, WaitTimeout, WrongState
from relay_service.core.instance import State, Weights

ABORT, WAIT, KEEP, RETRACT = PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP, PauseMode.RETRACT


@pytest.fixture
def scene():
    """An instance that can run two requests at once."""
    return Scene(max_running=2)


async def two_run(scene: Scene, **how) -> None:
    """Two callers have three tokens each, and the fourth is being made."""
    for name in ("a", "b"):
        scene.ask(name, **how)
    await asyncio.sleep(3.5)


@pytest.mark.parametrize(
    ("mode", "versions", "counts"),
    [
        (ABORT, ["v1"] * 4, {"aborted": 2, "waiting": 1}),
        (WAIT, ["v1"] * 10, {"finished": 2, "waiting": 1}),
        (KEEP, ["v1"] * 4 + ["v2"] * 6, {"paused": 2, "waiting": 1}),
        (RETRACT, ["v1"] * 4 + ["v2"] * 6, {"retracted": 2, "waiting": 3}),
    ],
)
@played
async def test_each_mode(scene, mode, versions, counts):
    """Answers are of the versions that the mode allows; late ones are of the new one alone."""
    await two_run(scene)
    updating = asyncio.ensure_future(scene.updated(mode, seconds=5))
    await asyncio.sleep(0.2)
    late = scene.ask("late")
    report = await updating
    assert by_name(report) == counts
    assert not report.was_paused
    assert scene.lifecycle.state is State.READY
    await scene.over()
    assert [scene.callers[name].versions for name in ("a", "b")] == [versions, versions]
    assert all(one.tokens == list(range(5, 5 + len(one.tokens))) for one in scene.callers.values())
    assert late.versions == ["v2"] * 10


@pytest.mark.parametrize("mode", PauseMode)
@played
async def test_an_instance_that_is_paused_already(scene, mode):
    """An update takes the pause as it is, and leaves it."""
    await two_run(scene)
    await scene.pause(KEEP, operator="first")
    report = await scene.updated(mode)
    assert (by_name(report), report.was_paused, report.mode) == ({"paused": 2}, True, KEEP)
    assert scene.lifecycle.state is State.PAUSED
    assert scene.engine.gate.closed_by.operator == "first"
    await asyncio.sleep(100)
    await scene.resume()
    await scene.over()
    assert scene.callers["a"].versions == ["v1"] * 4 + ["v2"] * 6


@pytest.mark.parametrize("paused", [True, False])
@played
async def test_an_update_that_raises(scene, paused):
    """The instance goes back to what it was, with its old weights."""
    await two_run(scene)
    if paused:
        await scene.pause(KEEP)
    with pytest.raises(EngineError, match="no luck"):
        async with scene.update(RETRACT):
            raise EngineError("no luck")
    assert scene.lifecycle.state is (State.PAUSED if paused else State.READY)
    assert scene.engine.frozen is paused
    if paused:
        await scene.resume()
    await scene.over()
    assert scene.callers["a"].versions == ["v1"] * 10


@played
async def test_an_update_that_leaves_the_instance_failed(scene):
    """Every request ends with the reason, and no step runs on what is in the arena."""
    await two_run(scene)
    rows = scene.runner.rows

    async def die() -> None:
        async with scene.update(KEEP):
            scene.ask("late")
            await settled()
            scene.lifecycle.to(State.FAILED, "died half-way")
            raise EngineError("died half-way")

    with pytest.raises(EngineError, match="half-way"):
        await die()
    await scene.over()
    assert {type(caller.error) for caller in scene.callers.values()} == {NotReady}
    assert "died half-way" in str(scene.callers["late"].error)
    assert scene.runner.rows == rows
    assert scene.lifecycle.state is State.FAILED


@played
async def test_continuing_while_weights_are_applied(scene):
    """It is refused; afterwards it works."""
    await scene.pause(KEEP)
    updating = asyncio.ensure_future(scene.updated(KEEP, seconds=5))
    await asyncio.sleep(1)
    with pytest.raises(WrongState, match="being applied"):
        await scene.resume()
    await updating
    await scene.resume()
    assert scene.lifecycle.state is State.READY


@played
async def test_pausing_while_weights_are_applied(scene):
    """It takes effect when they are, and stays."""
    await two_run(scene)
    updating = asyncio.ensure_future(scene.updated(RETRACT, seconds=5))
    await asyncio.sleep(2)
    report = await scene.pause(WAIT)
    assert by_name(report) == {"finished": 2}
    assert updating.done()
    assert scene.lifecycle.state is State.PAUSED
    assert scene.callers["a"].versions == ["v1"] * 4 + ["v2"] * 6


@played
async def test_two_updates_at_once(scene):
    """One after the other, each with an answer of its own."""
    first, second = await asyncio.gather(scene.updated(KEEP, 5), scene.updated(KEEP, 5))
    assert scene.engine.weights.epoch == 3
    assert not first.was_paused
    assert not second.was_paused
    with pytest.raises(WaitTimeout, match="update by two: waited 2 s for update by one"):
        await asyncio.gather(
            scene.updated(KEEP, 5, operator="one"),
            scene.updated(KEEP, operator="two", deadline_seconds=2),
        )


@played
async def test_an_update_waits_for_admissions(scene):
    """A request that is being tokenized gets to the queue first; a later one comes afterwards."""
    early = scene.ask("early", max_tokens=1)
    await settled()
    async with scene.update(KEEP) as report:
        assert by_name(report) == {"waiting": 1}
        assert [one.request for one in scene.scheduler.waiting] == [early.request]
        late = scene.ask("late", max_tokens=1)
        await asyncio.sleep(10)
        assert [one.request for one in scene.scheduler.waiting] == [early.request]
    await scene.over()
    assert (early.versions, late.versions) == (["v2"], ["v2"])


@played
async def test_a_pause_that_begins_while_a_request_waits_for_the_lock(scene):
    """Having passed an open gate is no ticket past one that was closed since."""
    early = scene.ask("early", max_tokens=1)
    await settled()
    updating = asyncio.ensure_future(scene.updated(KEEP, 5))
    await settled()
    late = scene.ask("late", max_tokens=1)
    await settled()
    await scene.pause(KEEP)
    await updating
    await asyncio.sleep(10)
    assert [one.request for one in scene.scheduler.waiting] == [early.request]
    assert scene.engine.gate.waiting == 1
    await scene.resume()
    await scene.over()
    assert late.versions == ["v2"]


@played
async def test_only_one_version(scene):
    """A request that demands one version ends with what it has, unless it has nothing yet."""
    await two_run(scene, one_version=True)
    fresh = scene.ask("c", one_version=True)
    await asyncio.sleep(0.2)
    for mode in (KEEP, RETRACT):
        await scene.updated(mode)
    await scene.over()
    for name in ("a", "b"):
        caller = scene.callers[name]
        assert (caller.versions, caller.finish) == (["v1"] * 4, Finish.ABORT)
    assert (len(fresh.tokens), len(set(fresh.versions))) == (10, 1)


@pytest.mark.parametrize("mode", [KEEP, RETRACT])
@played
async def test_a_demanded_version(scene, mode):
    """It is refused where another serves; one that waits for a turn fails when its own has gone."""
    request = scene.ask("other").request
    for version, served in (("v1", True), ("v2", False)):
        asked = dataclasses.replace(request, request=version, weight_version=version)
        if served:
            (running,) = scene.engine.submit(asked)
        else:
            with pytest.raises(WrongState, match="'v1' serves, 'v2' is demanded"):
                scene.engine.submit(asked)
    await asyncio.sleep(2.5)
    (waiting,) = scene.engine.submit(dataclasses.replace(request, request="w", weight_version="v1"))
    waiting.request = dataclasses.replace(waiting.request, priority=-1)
    scene.scheduler.admits_new = False
    await scene.updated(mode)
    assert running.finish is Finish.ABORT
    assert waiting.finish is Finish.ERROR
    with pytest.raises(WrongState, match="'v2' serves, 'v1' is demanded"):
        raise waiting.events.get_nowait()
    await scene.over()


@played
async def test_frozen_kv_is_nobody_elses(scene):
    """A frozen request goes on with its old KV; the same prompt finds none of it."""
    scene.ask("a", prompt=12, max_tokens=20)
    await asyncio.sleep(2.5)
    await scene.updated(KEEP, clear_cache=False)
    again = scene.ask("again", prompt=12, max_tokens=1)
    await asyncio.wait([again.task])
    assert (again.versions, again.events[0].reused) == (["v2"], 0)
    await scene.over()
    late = scene.ask("late", prompt=30, max_tokens=1)  # as long as prompt and answer of `a`
    await asyncio.wait([late.task])
    assert late.events[0].reused == 12  # what `again` has computed, and nothing of `a`
    assert set(scene.callers["a"].versions) == {"v1", "v2"}


@played
async def test_a_prompt_that_was_frozen_half_read(scene):
    """Without a token nothing would say whose KV it is, so it is computed anew."""
    scene.scheduler.limits = dataclasses.replace(scene.scheduler.limits, prefill_chunk_tokens=8)
    caller = scene.ask("a", prompt=30, max_tokens=3)
    await asyncio.sleep(1.5)
    report = await scene.updated(KEEP)
    assert by_name(report) == {"paused": 1}
    await scene.over()
    assert caller.versions == ["v2"] * 3


@played
async def test_trimming_after_an_update(scene):
    """The first continue after an update trims once, unless asked not to."""
    await scene.pause(KEEP)
    assert (await scene.resume()).reserved_bytes_before == 0
    for keep in (True, False):
        await scene.pause(KEEP)
        await scene.updated(KEEP)
        report = await scene.resume(keep_reserved=keep)
        assert (report.reserved_bytes_before, report.reserved_bytes_after) == (
            (0, 0) if keep else (100, 60)
        )
    await scene.pause(KEEP)
    await scene.resume()
    assert scene.trims == 1
    assert scene.engine.weights == Weights("v3", "d3", 3)
