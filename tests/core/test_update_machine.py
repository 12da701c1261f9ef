"""Sessions of many callers in any order, in virtual time, against a model of who may do what."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from updates import BRINGS, TENSORS, Stand, VirtualLoop, contents_of, pieces, wanted

from engine_service.core.turn import MAX_WAITING
from engine_service.core.update_session import Session
from engine_service.core.update_sessions import Caller
from engine_service.core.version_history import Result
from engine_service.errors import EngineError, UpdateBusy, UpdateEnded

PUSH = wanted("push")
OLD, NEW = contents_of(b"old"), BRINGS["push"]()


@dataclass
class Known:
    """What the model knows of a session."""

    session: Session
    lease: float
    last_word: float
    is_exact: bool
    """Whether it is known when the last word was; else it was earlier."""
    is_staged: bool = False
    reports: list = field(default_factory=list)


class Sessions(RuleBasedStateMachine):
    """Begins, stages, commits, aborts, renews, waits and leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.stand = self.do(self._stand())
        self.known: dict[str, Known] = {}
        self.begins: dict[asyncio.Task, tuple[Caller, float]] = {}
        self.keys: dict[str, str] = {}
        self.commits = 0

    def do(self, work):
        """Runs something, and lets everybody else come to rest."""

        async def settled():
            done = await asyncio.gather(work, return_exceptions=True)
            for _ in range(60):
                await asyncio.sleep(0)
            return done[0]

        return self.runner.run(settled())

    async def _stand(self) -> Stand:
        return Stand(Path("/nonexistent"))

    @property
    def now(self) -> float:
        """Virtual time."""
        return self.runner.get_loop().time()

    @property
    def open(self) -> Known | None:
        """The session that is open, by the model."""
        for one in self.known.values():
            if one.session.result is None:
                return one
        return None

    @rule(
        key=st.sampled_from(["", "", "a", "b"]),
        wait=st.sampled_from([0.0, 15.0, 200.0]),
        lease=st.sampled_from([10.0, 100.0]),
    )
    def begin(self, key, wait, lease):
        """Somebody asks for a session."""
        caller = Caller(key=key, wait_seconds=wait, lease_seconds=lease)

        async def ask():
            return asyncio.ensure_future(self.stand.updates.begin(PUSH, caller))

        self.begins[self.do(ask())] = caller, self.now

    @precondition(lambda self: self.begins)
    @rule(data=st.data())
    def leave(self, data):
        """Somebody who waits leaves."""
        task = data.draw(st.sampled_from(list(self.begins)))

        async def cancel():
            task.cancel()

        self.do(cancel())
        self.begins.pop(task)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), what=st.sampled_from(["push", "commit", "abort", "renew"]))
    def say(self, data, what):
        """Somebody uses a session, an ended one perhaps."""
        one = data.draw(st.sampled_from(list(self.known.values())))
        was, answer = one.session.result, self.do(self._say(one, what))
        if was is None and not isinstance(answer, Exception):
            one.last_word, one.is_exact = self.now, True
        if what == "push":
            assert (was is None and not one.is_staged) == (not isinstance(answer, EngineError))
            one.is_staged |= was is None
        elif what == "commit":
            may = (was is None and one.is_staged) or was is Result.SERVES
            assert may == (not isinstance(answer, Exception)), answer
            self.commits += was is None and may
            one.reports += [answer] * may
            assert all(report is one.reports[0] for report in one.reports)
        elif what == "abort":
            assert answer is (was is None)
        else:
            assert isinstance(answer, UpdateEnded) == (was is not None)

    async def _say(self, one: Known, what: str):
        if what == "push":
            return await self.stand.updates.push(one.session.name, TENSORS, pieces())
        if what == "renew":
            return one.session.renew()
        return await (one.session.commit() if what == "commit" else one.session.abort("by hand"))

    @rule(seconds=st.sampled_from([1.0, 9.0, 11.0, 60.0]))
    def wait(self, seconds):
        """Time passes."""
        self.do(asyncio.sleep(seconds))

    @invariant()
    def holds(self):
        """Whatever was done."""
        self.who_began()
        self.one_at_a_time()
        self.what_serves()

    def who_began(self):
        """Those that asked have a session, or the reason why not, or still have time."""
        for task in [task for task in self.begins if task.done()]:
            caller, since = self.begins.pop(task)
            if error := task.exception():
                assert isinstance(error, UpdateBusy)
                continue
            session = task.result()
            if session.name not in self.known:
                self.known[session.name] = Known(
                    session, session.lease_seconds, self.now, since == self.now
                )
            if caller.key:
                self.keys[caller.key] = session.name

        for caller, since in self.begins.values():
            assert self.open, "somebody waits for nobody"
            assert self.now - since <= caller.wait_seconds

    def one_at_a_time(self):
        """At most one is open, within its lease; its turn is taken just as long."""
        states = Counter(one.session.result for one in self.known.values())
        assert states[None] <= 1
        current = self.stand.updates.current
        assert (current is None) == (states[None] == 0)
        assert (current is None) == (not self.stand.instance.turn.holder)
        if self.open:
            assert current is self.open.session
            assert self.now - self.open.last_word <= self.open.lease
        for one in self.known.values():
            if "lease has ended" in one.session.reason and one.is_exact:
                assert self.now - one.last_word >= one.lease
        assert self.stand.instance.turn.waiting <= MAX_WAITING

    def what_serves(self):
        """The weights are those of the last commit, and nothing is staged for nobody."""
        stand = self.stand
        assert stand.instance.engine.weights.epoch == 1 + self.commits
        assert stand.ranks.arenas_hold == (NEW if self.commits else OLD)
        assert (stand.ranks.staged is not None) <= bool(self.open and self.open.is_staged)
        ends = Counter(one.session.result for one in self.known.values())
        records = Counter(one.result for one in stand.instance.history.records)
        assert records[Result.ABORTED] == ends[Result.ABORTED]
        assert records[Result.SERVED] == self.commits
        assert records[Result.SERVES] == 1

    def teardown(self):
        """Ends what still waits."""
        self.runner.close()


Sessions.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSessions = Sessions.TestCase
