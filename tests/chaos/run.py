"""Plays a plan with real processes, and judges how everybody ends."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relay_service.core.instance import State
from tests.chaos import leftovers, truth
from tests.chaos.actors import DEADLINE_SECONDS
from tests.chaos.cast import Actor
from tests.chaos.plan import DIRECTORY, Engine, Event, Kind, Plan
from tests.chaos.verdict import OVERTIME_SECONDS, Verdict

START_SECONDS = 60.0
FOLLOW_SECONDS = 3.0
"""After which what follows another event happens, though no target gets on."""
SETTLE_SECONDS = 30.0
TICK_SECONDS = 0.05
ENDED = (State.READY, State.FAILED)
Say = Callable[[str], None]


class Hang(Exception):
    """Something did not come to an end in time."""


class Run:
    """One plan, its processes, and what was found wrong."""

    def __init__(self, plan: Plan, folder: Path, say: Say) -> None:
        self._plan = plan
        self._folder = folder
        self._say = say
        self._truth = truth.Truth(plan)
        self._wrong: list[str] = []
        self._cast: dict[str, Actor] = {}
        self._former: list[Actor] = []
        """Processes that others took the place of."""
        self._liars: set[str] = set()
        self._fired: dict[int, float] = {}
        self._began = 0.0

    async def play(self) -> list[str]:
        """Plays the plan to its end; returns what was wrong."""
        (self._folder / "model").mkdir()
        (self._folder / "model" / "config.json").write_text("{}")
        try:
            await self._set_up()
            self._began = time.monotonic()
            for engine in self._plan.targets:
                self._engine(engine)
            await self._until(lambda: self._all(self._over), DEADLINE_SECONDS + OVERTIME_SECONDS)
            self._fire()  # what has not happened yet is due by now
            for actor in self._cast.values():
                actor.resume()
            await self._until(lambda: self._all(self._ended), DEADLINE_SECONDS + OVERTIME_SECONDS)
            await self._settle()
        except Hang as hang:
            self._wrong.append(str(hang))
            await self._write_stacks()
        finally:
            self._end()
        self._judge()
        return self._wrong

    # Who takes part

    async def _set_up(self) -> None:
        self._relay(DIRECTORY)
        await self._until(lambda: self._said(DIRECTORY, "address"), START_SECONDS)
        relays, seeds = self._plan.relays, [engine.name for engine in self._plan.seeds]
        for name in relays:
            self._relay(name)
        await self._until(lambda: all(self._said(n, "address") for n in relays), START_SECONDS)
        for engine in self._plan.seeds:
            self._engine(engine)
        await self._until(
            lambda: all(self._said(name, "state") == State.READY for name in seeds),
            START_SECONDS,
        )

    def _relay(self, name: str, listen: str = "127.0.0.1:0") -> Actor:
        directory = "" if name == DIRECTORY else self._cast[DIRECTORY].said["address"]
        return self._start(name, "relay", listen, directory)

    def _engine(self, engine: Engine) -> None:
        relay = self._cast[engine.relay].said["address"]
        self._start(engine.name, "engine", self._plan, engine, relay, self._folder / "model")

    def _start(self, name: str, role: str, *arguments: Any) -> Actor:
        if former := self._cast.get(name):
            self._former.append(former)
        log = self._folder / f"{name}.log"
        self._cast[name] = Actor(name, role, log, arguments).start(self._hear)
        return self._cast[name]

    # What happens

    def _hear(self, actor: Actor, said: dict[str, Any]) -> None:
        actor.said |= said
        state = said.get("state")
        if state == State.READY:
            self._look(actor)
        if state in ENDED:
            actor.said.setdefault("ended_at", time.monotonic())

    def _look(self, actor: Actor) -> None:
        """Holds an instance that is ready to what it claims, unless we made it lie."""
        if actor.name in self._liars:
            return
        said, arena = actor.said, Path(f"/proc/{actor.pid}/fd/{actor.said['fd']}")
        try:
            lie = self._truth.lie(arena, said["version"], said["digest"])
        except OSError:
            return  # it was killed meanwhile
        if said["probe"] != truth.probe(said["version"]):
            lie = lie or f"it has the {said['probe']!r}"
        if lie:
            self._wrong.append(f"{actor.name} is ready, but {lie}")

    def _fire(self) -> None:
        for number, event in enumerate(self._plan.events):
            if number not in self._fired and self._due(event):
                self._fired[number] = time.monotonic()
                self._say(f"{time.monotonic() - self._began:.1f} s: {event}")
                self._do(event)

    def _due(self, event: Event) -> bool:
        there = self._over(event.target) or self._said(event.target, "percent") >= event.percent
        if event.follows < 0:
            return there
        since = self._fired.get(event.follows)
        return since is not None and (there or time.monotonic() - since > FOLLOW_SECONDS)

    def _do(self, event: Event) -> None:
        actor = self._cast[event.whom]
        if event.kind is Kind.RESTART:
            self._relay(event.whom, actor.said["address"]).said |= actor.said
        elif event.kind is Kind.KILL:
            actor.kill()
        elif event.kind is Kind.STOP:
            actor.stop()
        elif event.kind is Kind.RESUME:
            actor.resume()
        else:
            if event.kind is Kind.FLIP:
                self._liars.add(event.whom)
            actor.tell(event.kind)

    # How far it is

    def _said(self, name: str, what: str) -> Any:
        return self._cast[name].said.get(what, 0)

    def _ended(self, name: str) -> bool:
        return not self._cast[name].alive or self._said(name, "state") in ENDED

    def _over(self, name: str) -> bool:
        """Whether a target has ended, or hangs so that it cannot."""
        return self._ended(name) or self._cast[name].stopped

    def _all(self, what: Callable[[str], bool]) -> bool:
        return all(what(engine.name) for engine in self._plan.targets)

    async def _until(self, done: Callable[[], Any], seconds: float) -> None:
        """Lets things happen until something holds. Raises `Hang`."""
        deadline = time.monotonic() + seconds
        while True:
            held = done()
            if await held if isinstance(held, Awaitable) else held:
                return
            if time.monotonic() > deadline:
                states = (f"{name} {self._said(name, 'state') or ''}" for name in self._cast)
                raise Hang(f"not over after {seconds:g} s: {', '.join(states)}")
            if self._began:
                self._fire()
            await asyncio.sleep(TICK_SECONDS)

    # How it ends

    async def _settle(self) -> None:
        """Waits until nobody holds what is not needed, and everybody knows who is ready."""
        left: list[str] = []

        updated = {event.whom for event in self._plan.events if event.kind is Kind.UPDATE}

        async def nothing() -> bool:
            old = [n for n in updated if self._cast[n].alive and self._said(n, "version") != "v2"]
            left[:] = [f"{name} has not been updated" for name in old]
            left[:] += await leftovers.of_fleet(self._plan, self._cast)
            return not left

        try:
            await self._until(nothing, SETTLE_SECONDS)
        except Hang:
            self._wrong += left

    async def _write_stacks(self) -> None:
        for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2):
            for actor in self._cast.values():
                actor.signal(number)
        await asyncio.sleep(1)  # for them to write; nobody depends on it

    def _end(self) -> None:
        """Looks at everybody once more, and ends all processes: engines first."""
        for actor in self._cast.values():
            if actor.alive and actor.said.get("state") == State.READY:
                self._look(actor)
        for actor in [*self._former, *sorted(self._cast.values(), key=lambda one: one.role)]:
            actor.resume()
            code = actor.end()
            if code != 0 and not actor.killed:
                self._wrong.append(f"{actor.name} ended with {code}")

    def _judge(self) -> None:
        for engine in self._plan.targets:
            target = self._cast[engine.name]
            seconds = target.said.get("ended_at", time.monotonic()) - self._began
            verdict = Verdict(self._plan, target, seconds, self._liars)
            self._say(str(verdict))
            self._wrong += verdict.wrong()
        for actor in self._cast.values():
            if "Traceback" in actor.log.read_text("utf-8", "replace"):
                self._wrong.append(f"{actor.name} has a traceback in its log")


def play(plan: Plan, say: Say) -> tuple[list[str], str]:
    """Plays a plan; returns what was wrong, and if something was, what the processes logged."""
    with tempfile.TemporaryDirectory() as folder:
        wrong, logs = asyncio.run(Run(plan, Path(folder), say).play()), ""
        for log in sorted(Path(folder).glob("*.log")) if wrong else ():
            logs += f"--- {log.name}\n{log.read_text('utf-8', 'replace')}\n"
        return wrong, logs
