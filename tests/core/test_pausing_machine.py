"""Pauses, updates, requests and those who leave, from several clients at once, in any order."""

import asyncio
import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pausing_scene import Scene
from virtual_time import VirtualLoop, settled

from engine_service.core.pause_modes import PauseMode
from engine_service.core.request import Finish
from engine_service.errors import NotReady, QueueFull, WaitTimeout, WrongState
from relay_service.core.instance import State

MODES = st.sampled_from(PauseMode)
FALLBACKS = st.sampled_from([None, PauseMode.ABORT, PauseMode.KEEP, PauseMode.RETRACT])
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0])
DEADLINES = st.sampled_from([None, 0.0, 1.5, 8.0])
REFUSALS = (WaitTimeout, WrongState, NotReady)


class NoLuckError(Exception):
    """What an update fails with."""


class Pausing(RuleBasedStateMachine):
    """A scene checks every step by itself: when it may run, and which KV it may read."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.calls: list[asyncio.Task] = []
        self.asked = 0
        self.stopped = False
        self.runner.run(self._begin())

    @precondition(lambda self: not self.stopped)
    @rule(
        prompt=st.integers(1, 20), tokens=st.integers(1, 12), one_version=st.booleans(),
        calmly=st.booleans(),
    )  # fmt: skip
    def ask(self, prompt, tokens, one_version, calmly):
        """Somebody asks, and perhaps gets as far as the queue."""
        self.asked += 1

        async def come():
            self.scene.ask(f"{self.asked}", prompt, tokens, one_version=one_version)
            await (asyncio.sleep(0.2) if calmly else settled())

        self.runner.run(come())

    @rule(
        mode=MODES, clear=st.sampled_from([None, True, False]), deadline=DEADLINES,
        then=FALLBACKS, delay=st.sampled_from([0.0, 0.0, 2.0]),
    )  # fmt: skip
    def pause(self, mode, clear, deadline, then, delay):
        """A client pauses."""
        how = {"clear_cache": clear, "deadline_seconds": deadline, "on_deadline": then}
        self._call(self.scene.pause(mode, drain_delay_seconds=delay, **how))

    @rule(keep=st.booleans())
    def resume(self, keep):
        """A client continues."""
        self._call(self.scene.resume(keep_reserved=keep))

    @rule(mode=MODES, deadline=DEADLINES, then=FALLBACKS, seconds=SECONDS, fails=st.booleans())
    def update(self, mode, deadline, then, seconds, fails):
        """A client changes the weights, or fails to."""

        async def work():
            async with self.scene.update(mode, deadline_seconds=deadline, on_deadline=then):
                await asyncio.sleep(seconds)
                if fails:
                    raise NoLuckError

        self._call(work())

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel_a_call(self, data):
        """A client leaves while its call waits, or after it."""
        call = data.draw(st.sampled_from(self.calls))
        call.cancel()
        self.runner.run(settled())

    @precondition(lambda self: self.scene.callers)
    @rule(data=st.data(), leaves=st.booleans())
    def end_a_request(self, data, leaves):
        """A caller leaves, or is aborted by name."""
        name = data.draw(st.sampled_from(list(self.scene.callers)))

        async def end():
            if leaves:
                self.scene.callers[name].task.cancel()
            else:
                self.scene.engine.abort(name)
            await settled()

        self.runner.run(end())

    @rule()
    def flush(self):
        """The prefix cache is emptied."""
        self.scene.pauser.flush()
        assert self.scene.scheduler.pool.cached == 0

    @precondition(lambda self: self.asked > 3 and not self.stopped)
    @rule()
    def stop(self):
        """The process is asked to end."""
        self.stopped = True
        self.scene.lifecycle.to(State.DRAINING)
        self.scene.pauser.stop()
        self.scene.paused = False
        self.runner.run(settled())
        self._collect()

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        """Time goes by."""
        self.runner.run(asyncio.sleep(seconds))

    @invariant()
    def state_is_true(self):
        """State, gate and steps say what is the case."""
        scene, state = self.scene, self.scene.lifecycle.state
        assert not scene.stepping.done(), scene.stepping
        assert (state is State.UPDATING) == scene.applying or self.stopped
        assert not (self.stopped and scene.engine.gate.waiting)
        if scene.paused:
            assert state in (State.PAUSED, State.UPDATING)
            assert scene.engine.gate.closed_by
        if state is State.READY:
            assert scene.engine.gate.closed_by is None
            assert not scene.engine.frozen
        assert all(one.finish is None for one in scene.scheduler.begun)

    def teardown(self):
        """Everybody gets an answer, and every request its whole end, once there is time."""
        try:
            self.runner.run(self._end())
        finally:
            self.runner.close()

    async def _begin(self):
        self.scene = Scene(max_running=3, blocks=14, chunk=8)
        self.scene.begin()

    async def _end(self):
        scene = self.scene
        async with asyncio.timeout(10_000):
            while self.calls:
                with contextlib.suppress(WrongState, NotReady):
                    await scene.resume()
                await asyncio.wait(self.calls, timeout=50)
                self._collect()
            if not self.stopped:
                await scene.resume()
            if scene.callers:
                await asyncio.wait([one.task for one in scene.callers.values()])
        await scene.close()
        for caller in scene.callers.values():
            self._check(caller)
        assert (scene.scheduler.running, scene.scheduler.waiting) == ([], [])
        assert (scene.scheduler.pool.used, scene.pauser.lock.holders()) == (0, [])
        assert scene.lifecycle.state is (State.DRAINING if self.stopped else State.READY)

    def _check(self, caller):
        """Its tokens follow each other, and it ended once, for a reason that somebody gave."""
        first = len(caller.request.prompt)
        assert caller.tokens == list(range(first, first + len(caller.tokens)))
        assert [event.finish for event in caller.events[:-1]] == [None] * (len(caller.events) - 1)
        if caller.finish is Finish.LENGTH:
            assert len(caller.tokens) == caller.request.max_tokens
        if caller.request.one_version:
            assert len(set(caller.versions)) <= 1
        assert caller.finish or caller.left
        assert isinstance(caller.error, QueueFull | None)

    def _call(self, work):
        self.calls.append(self.runner.get_loop().create_task(work))
        self.runner.run(settled())
        self._collect()

    def _collect(self):
        """A call succeeds, is refused for a reason, or was cancelled."""
        for call in [call for call in self.calls if call.done()]:
            self.calls.remove(call)
            if not call.cancelled():
                assert isinstance(call.exception(), (*REFUSALS, NoLuckError, type(None)))


Pausing.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestPausing = Pausing.TestCase
