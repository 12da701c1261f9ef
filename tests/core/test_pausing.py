"""What a pause does to requests, who may do it, and what is left when it fails."""

import asyncio

import pytest
from pausing_scene import Scene, by_name, played
from virtual_time import settled

from engine_service.core.pause_modes import PauseMode
from engine_service.core.request import Finish
from engine_service.errors import EngineError, NotReady, QueueFull, WaitTimeout, WrongState
from relay_service.core.instance import State

ABORT, WAIT, KEEP, RETRACT = PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP, PauseMode.RETRACT
WHOLE = list(range(5, 15))
"""Tokens of an answer that nobody disturbs."""


@pytest.fixture
def scene():
    """An instance that can run two requests at once."""
    return Scene(max_running=2)


async def three(scene: Scene) -> None:
    """Two callers get tokens, and one waits."""
    for name in ("a", "b", "c"):
        scene.ask(name)
    await asyncio.sleep(3.5)


@pytest.mark.parametrize(
    ("mode", "counts", "used", "ends"),
    [
        (ABORT, {"aborted": 2, "waiting": 1}, 0, [Finish.ABORT, Finish.ABORT, Finish.LENGTH]),
        (WAIT, {"finished": 2, "waiting": 1}, 0, [Finish.LENGTH] * 3),
        (KEEP, {"paused": 2, "waiting": 1}, 4, [Finish.LENGTH] * 3),
        (RETRACT, {"retracted": 2, "waiting": 3}, 0, [Finish.LENGTH] * 3),
    ],
)
@played
async def test_each_mode(scene, mode, counts, used, ends):
    """Counts, KV and ends are those of the mode; no token flows while it is paused."""
    await three(scene)
    before = [len(caller.tokens) for caller in scene.callers.values()]
    assert before == [3, 3, 0]
    report = await scene.pause(mode)
    assert (by_name(report), report.mode, report.was_paused) == (counts, mode, False)
    assert scene.scheduler.pool.used == used
    assert scene.lifecycle.state is State.PAUSED
    assert scene.engine.gate.closed_by.mode == mode
    rows = scene.runner.rows
    await asyncio.sleep(100)
    assert scene.runner.rows == rows
    resumed = await scene.resume()
    assert resumed.was_paused
    assert scene.lifecycle.state is State.READY
    await scene.over()
    assert [caller.finish for caller in scene.callers.values()] == ends
    for caller in scene.callers.values():
        assert caller.tokens == WHOLE[: len(caller.tokens)]
        assert len(caller.tokens) == (10 if caller.finish is Finish.LENGTH else 4)
    assert scene.scheduler.pool.used == 0


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("clear", [None, True, False])
@played
async def test_the_prefix_cache(scene, mode, clear):
    """It is emptied unless requests are kept, or as the call says; held blocks stay."""
    await three(scene)
    report = await scene.pause(mode, clear_cache=clear)
    cleared = clear if clear is not None else mode is not KEEP
    assert (scene.scheduler.pool.cached == 0) is cleared
    assert (report.flushed_blocks > 0) is (cleared and mode is not KEEP)
    await scene.resume()
    await scene.over()
    assert scene.callers["c"].tokens == WHOLE


@played
async def test_an_idle_instance(scene):
    """Every mode, twice, continuing twice and flushing are harmless where nothing runs."""
    assert not (await scene.resume()).was_paused
    for mode in PauseMode:
        for again in (False, True):
            report = await scene.pause(mode)
            assert (by_name(report), report.was_paused) == ({}, again)
        assert (await scene.resume()).was_paused
        assert not (await scene.resume()).was_paused
    assert (scene.pauser.flush(), scene.pauser.abort_all()) == (0, 0)
    scene.ask("a")
    await scene.over()
    assert scene.callers["a"].tokens == WHOLE


@pytest.mark.parametrize(
    ("then", "counts"),
    [
        (ABORT, {"aborted": 2, "waiting": 1}),
        (WAIT, {"finished": 2, "waiting": 1}),
        (KEEP, {"paused": 2, "waiting": 1}),
        (RETRACT, {"retracted": 2, "waiting": 3}),
    ],
)
@played
async def test_pausing_what_is_paused(scene, then, counts):
    """Another mode does to frozen requests what it says; who paused first is still named."""
    await three(scene)
    await scene.pause(KEEP, operator="first")
    report = await scene.pause(then, operator="second")
    assert (by_name(report), report.was_paused) == (counts, True)
    assert (scene.engine.gate.closed_by.operator, scene.engine.gate.closed_by.mode) == (
        "first", then,
    )  # fmt: skip
    assert scene.engine.frozen
    await scene.resume()
    await scene.over()


@played
async def test_those_that_were_retracted_are_waited_for(scene):
    """`wait` lets requests finish that a pause has sent back; new ones do not begin."""
    await three(scene)
    await scene.pause(RETRACT)
    report = await scene.pause(WAIT)
    assert by_name(report) == {"finished": 2, "waiting": 1}
    assert [len(caller.tokens) for caller in scene.callers.values()] == [10, 10, 0]
    await scene.resume()
    await scene.over()


@played
async def test_finding_ones_own_kv_again(scene):
    """What a retracted request finds of its own is no KV of others: nothing counts as cached."""
    caller = scene.ask("a")
    await asyncio.sleep(5.5)
    await scene.pause(RETRACT, clear_cache=False)
    await scene.resume()
    await asyncio.sleep(1)
    assert scene.scheduler.running[0].cached > 5
    await scene.over()
    assert [event.reused for event in caller.events] == [0] * 10


@played
async def test_a_deadline_without_a_mode(scene):
    """Requests that still run then make the call fail; the instance is as it was."""
    await three(scene)
    with pytest.raises(WaitTimeout, match="2 requests still run after 2 s"):
        await scene.pause(WAIT, deadline_seconds=2)
    assert scene.lifecycle.state is State.READY
    assert scene.engine.gate.closed_by is None
    await scene.over()
    assert all(caller.tokens == WHOLE for caller in scene.callers.values())


@played
async def test_a_deadline_leaves_a_pause_as_it_was(scene):
    """Frozen requests that were to finish, and did not, are frozen again."""
    await three(scene)
    await scene.pause(KEEP)
    with pytest.raises(WaitTimeout):
        await scene.pause(WAIT, deadline_seconds=2)
    assert scene.lifecycle.state is State.PAUSED
    rows = scene.runner.rows
    await asyncio.sleep(100)
    assert scene.runner.rows <= rows + 2  # the step that was in work
    await scene.resume()
    await scene.over()


@pytest.mark.parametrize("then", [ABORT, KEEP, RETRACT])
@played
async def test_a_deadline_with_a_mode(scene, then):
    """Those that still run then are let go of as the call says, and the report says so."""
    await three(scene)
    scene.ask("d", max_tokens=2)
    await scene.pause(ABORT)
    await scene.resume()
    await asyncio.sleep(1.5)
    report = await scene.pause(WAIT, deadline_seconds=2, on_deadline=then)
    counted = {ABORT: "aborted", KEEP: "paused", RETRACT: "retracted"}[then]
    assert (report.mode, report.requests.finished) == (then, 1)
    assert getattr(report.requests, counted) == 1
    await scene.resume()
    await scene.over()


@played
async def test_a_caller_who_leaves_while_it_waits(scene):
    """Nothing is half done: the gate is open and everybody is served."""
    await three(scene)
    waiting = asyncio.ensure_future(scene.pause(WAIT))
    await asyncio.sleep(2)
    assert (scene.lifecycle.state, scene.engine.frozen) == (State.PAUSED, False)
    late = scene.ask("late")
    await settled()
    assert scene.engine.gate.waiting == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert scene.lifecycle.state is State.READY
    await scene.over()
    assert late.tokens == WHOLE


@played
async def test_continuing_while_another_call_waits(scene):
    """Who waits for requests to finish is told that somebody has continued."""
    await three(scene)
    waiting = asyncio.ensure_future(scene.pause(WAIT))
    await asyncio.sleep(2)
    assert (await scene.resume()).was_paused
    with pytest.raises(WrongState, match="another call has continued"):
        await waiting
    assert scene.lifecycle.state is State.READY


@pytest.mark.parametrize("mode", [ABORT, KEEP, RETRACT])
@played
async def test_pausing_while_another_call_waits(scene, mode):
    """Whoever ends the requests ends the wait; whoever keeps them from it, is named in an error."""
    await three(scene)
    waiting = asyncio.ensure_future(scene.pause(WAIT))
    await asyncio.sleep(2)
    await scene.pause(mode, operator="second")
    await asyncio.wait([waiting])
    if mode is ABORT:
        assert by_name(await waiting) == {"waiting": 1}
    else:
        with pytest.raises(WrongState, match="second has frozen"):
            await waiting
    assert scene.lifecycle.state is State.PAUSED
    await scene.resume()
    await scene.over()


@played
async def test_turning_away(scene):
    """Health says so first; requests are served until the gate closes."""
    await three(scene)
    pausing = asyncio.ensure_future(scene.pause(KEEP, drain_delay_seconds=5))
    await settled()
    assert (scene.lifecycle.state, scene.engine.gate.closed_by) == (State.PAUSED, None)
    late = scene.ask("late", max_tokens=1)
    scene.pauser.abort_all()
    late = scene.ask("later", max_tokens=1)
    await asyncio.wait([late.task])
    assert late.finish is Finish.LENGTH
    report = await pausing
    assert report.seconds <= 1
    assert scene.engine.gate.closed_by is not None


@played
async def test_waiting_at_the_gate(scene):
    """New requests wait, within the limit, can be aborted, and are served in their order."""
    await three(scene)
    await scene.pause(KEEP)
    late = [scene.ask(f"late {n}", max_tokens=1) for n in range(8)]
    await settled()
    assert scene.engine.gate.waiting == 7  # one waits in the queue
    assert isinstance(late[7].error, QueueFull)
    assert scene.engine.abort("late 3") == 1
    await asyncio.sleep(1)
    assert (late[3].finish, late[3].tokens) == (Finish.ABORT, [])
    late[0].task.cancel()
    await settled()
    assert scene.engine.gate.waiting == 5
    await scene.resume()
    await scene.over()
    assert [one.finish for one in late[1:7]] == [
        Finish.LENGTH, Finish.LENGTH, Finish.ABORT, Finish.LENGTH, Finish.LENGTH, Finish.LENGTH,
    ]  # fmt: skip


@played
async def test_a_full_queue_that_was_sent_back(scene):
    """Retracted requests take nobody's place: whoever waited at the gate is served."""
    await three(scene)
    scene.scheduler.limits = scene.scheduler.limits.__class__(1000, 2, 3, 4)
    await scene.pause(RETRACT)
    late = [scene.ask(f"late {n}", max_tokens=1) for n in range(2)]
    await settled()
    await scene.resume()
    await scene.over()
    assert [one.tokens for one in late] == [[5], [5]]


@played
async def test_aborting_all_while_paused(scene):
    """Frozen, queued and waiting requests end, each counted; the instance stays paused."""
    await three(scene)
    await scene.pause(KEEP)
    scene.ask("late")
    await settled()
    assert scene.pauser.abort_all() == 4
    await scene.over()
    assert {caller.finish for caller in scene.callers.values()} == {Finish.ABORT}
    assert scene.lifecycle.state is State.PAUSED
    assert scene.scheduler.pool.used == 0


@pytest.mark.parametrize("mode", [WAIT, KEEP])
@played
async def test_stopping(scene, mode):
    """Who is frozen or waits ends at once; who runs may finish; waiting calls are told."""
    await three(scene)
    pausing = asyncio.ensure_future(scene.pause(mode))
    await asyncio.sleep(1.5)
    scene.ask("late")
    await settled()
    scene.lifecycle.to(State.DRAINING)
    scene.pauser.stop()
    if mode is WAIT:
        with pytest.raises(NotReady, match="stopping"):
            await pausing
    await scene.over()
    expected = Finish.ABORT if mode is KEEP else Finish.LENGTH
    assert [caller.finish for caller in scene.callers.values()] == [
        expected, expected, Finish.ABORT, Finish.ABORT,
    ]  # fmt: skip
    await scene.engine.idle()
    with pytest.raises(NotReady):
        await scene.pause(KEEP)
    with pytest.raises(NotReady):
        await scene.resume()


@played
async def test_a_rank_that_dies_while_paused(scene):
    """Everybody gets the error, the one at the gate and the call that waits included."""
    await three(scene)
    await scene.pause(KEEP)
    scene.ask("late")
    waiting = asyncio.ensure_future(scene.pause(WAIT))
    await settled()
    scene.lifecycle.to(State.FAILED, "rank 0 has died")
    scene.pauser.fail(EngineError("rank 0 has died"))
    with pytest.raises(EngineError, match="rank 0"):
        await waiting
    await scene.over()
    assert {str(caller.error) for caller in scene.callers.values()} == {"rank 0 has died"}
    assert scene.lifecycle.state is State.FAILED


@pytest.mark.parametrize("state", [State.STARTING, State.DUMMY, State.FAILED, State.DRAINING])
@played
async def test_an_instance_without_weights(scene, state):
    """It cannot be paused, continued or updated, and says what it is."""
    scene.lifecycle.state = state
    for call in (scene.pause(KEEP), scene.resume(), scene.updated(KEEP)):
        with pytest.raises(NotReady, match=f"is {state}"):
            await call
    scene.lifecycle.state = State.READY
