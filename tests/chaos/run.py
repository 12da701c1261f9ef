"""Plays a plan with real processes, and judges how everybody ends."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay_service.config import DATA_CONNECTIONS
from relay_service.core.instance import State
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.reading import CORRUPTIONS_PER_SOURCE
from relay_service.rpc import convert
from clients.errors import ClientError
from clients.relay import RelayClient
from tests.chaos import leftovers, truth
from tests.chaos.actors import DEADLINE_SECONDS
from tests.chaos.cast import Actor
from tests.chaos.plan import DIRECTORY, Event, Kind, Plan

FOLLOW_SECONDS = 3.0
"""After which what follows another event happens, though no target gets on."""
OVERTIME_SECONDS = 15.0
"""What a target may take beyond its deadline: waits of its own, on a busy machine."""
SETTLE_SECONDS = 30.0
TICK_SECONDS = 0.1
BLOCKS_PER_LOSS = max(DATA_CONNECTIONS, CORRUPTIONS_PER_SOURCE + 1)
"""Blocks that may have to be read again when a source is lost: those in flight, or its lies."""
ENDED = (State.READY, State.FAILED)


class Hang(Exception):  # noqa: N818
    """Something did not come to an end in time."""


@dataclass
class Run:
    """One plan, its processes, and what was found wrong."""

    plan: Plan
    folder: Path
    say: Callable[[str], None] = lambda _: None
    wrong: list[str] = field(default_factory=list)
    cast: dict[str, Actor] = field(default_factory=dict)
    _former: list[Actor] = field(default_factory=list)
    _fired: dict[int, float] = field(default_factory=dict)

    async def play(self) -> list[str]:
        """Plays the plan to its end; returns what was wrong."""
        self._truth = truth.Truth(self.plan)
        self._liars: set[str] = set()
        (self.folder / "model").mkdir()
        (self.folder / "model" / "config.json").write_text("{}")
        try:
            await self._set_up()
            self._began = time.monotonic()
            for engine in self.plan.targets:
                self._engine(engine)
            await self._until(lambda: self._all(self._over), DEADLINE_SECONDS + OVERTIME_SECONDS)
            for actor in self.cast.values():
                actor.resume()
            await self._until(lambda: self._all(self._ended), DEADLINE_SECONDS + OVERTIME_SECONDS)
            await self._settle()
        except Hang as hang:
            self.wrong.append(f"hang: {hang}")
            await self._write_stacks()
        finally:
            await self._end()
        self._judge()
        return self.wrong

    # Who takes part

    async def _set_up(self) -> None:
        self._relay(DIRECTORY)
        await self._until(lambda: "address" in self.cast[DIRECTORY].said, OVERTIME_SECONDS)
        for name in self.plan.relays:
            self._relay(name)
        await self._until(
            lambda: all("address" in self.cast[name].said for name in self.plan.relays),
            OVERTIME_SECONDS,
        )
        for engine in self.plan.seeds:
            self._engine(engine)
        await self._until(
            lambda: all(self._state(engine.name) == State.READY for engine in self.plan.seeds),
            OVERTIME_SECONDS,
        )

    def _relay(self, name: str, listen: str = "127.0.0.1:0") -> None:
        directory = "" if name == DIRECTORY else self.cast[DIRECTORY].said["address"]
        self._start(name, "relay", listen, directory)

    def _engine(self, engine: Any) -> None:
        relay = self.cast[engine.relay].said["address"]
        self._start(engine.name, "engine", self.plan, engine, relay, self.folder / "model")

    def _start(self, name: str, role: str, *arguments: Any) -> None:
        if former := self.cast.get(name):
            self._former.append(former)
        log = self.folder / f"{name}.log"
        self.cast[name] = Actor(name, role, log, arguments).start(self._hear)

    # What happens

    def _hear(self, actor: Actor, said: dict[str, Any]) -> None:
        actor.said |= said
        state = said.get("state")
        if state == State.READY and actor.name not in self._liars:
            self._look(actor)
        if state in ENDED and "ended_at" not in actor.said:
            actor.said["ended_at"] = time.monotonic()

    def _look(self, actor: Actor) -> None:
        """Holds an instance that is ready to what it claims."""
        said, arena = actor.said, Path(f"/proc/{actor.pid}/fd/{actor.said['fd']}")
        try:
            lie = self._truth.lie(arena, said["version"], said["digest"])
        except OSError:
            return  # killed meanwhile
        if said["probe"] != truth.probe(said["version"]):
            lie = lie or f"it has the {said['probe']!r}"
        if lie:
            self.wrong.append(f"{actor.name} is ready, but {lie}")

    def _fire(self) -> None:
        for number, event in enumerate(self.plan.events):
            if number not in self._fired and self._due(event):
                self._fired[number] = time.monotonic()
                self.say(f"  {time.monotonic() - self._began:5.1f} s  {event}")
                self._do(event)

    def _due(self, event: Event) -> bool:
        there = self._over(event.target) or self._percent(event.target) >= event.percent
        if event.follows < 0:
            return there
        since = self._fired.get(event.follows)
        return since is not None and (there or time.monotonic() - since > FOLLOW_SECONDS)

    def _do(self, event: Event) -> None:
        actor = self.cast[event.whom]
        if event.kind is Kind.RESTART:
            if actor.killed:
                self._relay(event.whom, actor.said["address"])
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

    def _state(self, name: str) -> str:
        return self.cast[name].said.get("state", "")

    def _percent(self, name: str) -> int:
        return self.cast[name].said.get("percent", 0)

    def _ended(self, name: str) -> bool:
        actor = self.cast[name]
        return not actor.alive or self._state(name) in ENDED

    def _over(self, name: str) -> bool:
        """Whether a target has ended, or hangs so that it cannot."""
        return self._ended(name) or self.cast[name].stopped

    def _all(self, what: Callable[[str], bool]) -> bool:
        return all(what(engine.name) for engine in self.plan.targets)

    async def _until(self, done: Callable[[], Any], seconds: float) -> None:
        """Lets things happen until something holds. Raises `Hang`."""
        deadline = time.monotonic() + seconds
        while True:
            held = done()
            if await held if isinstance(held, Awaitable) else held:
                return
            if time.monotonic() > deadline:
                raise Hang(f"after {seconds:g} s: {self._where()}")
            if hasattr(self, "_began"):
                self._fire()
            await asyncio.sleep(TICK_SECONDS)

    def _where(self) -> str:
        each = (f"{n} {self._state(n) or 'says nothing'}" for n in self.cast)
        return ", ".join(each)

    # How it ends

    async def _settle(self) -> None:
        """Waits until nobody holds what is not needed, and everybody knows who is ready."""
        left: list[str] = []

        async def nothing() -> bool:
            left[:] = await self._leftovers()
            return not left

        try:
            await self._until(nothing, SETTLE_SECONDS)
        except Hang:
            self.wrong += left

    async def _leftovers(self) -> list[str]:
        found = []
        alive = [a for a in self.cast.values() if a.alive]
        for relay in (a for a in alive if a.role == "relay"):
            beside = [a for a in alive if a.role == "engine" and self._host(a.name) == relay.name]
            found += await leftovers.of_relay(relay, beside)
        return found + await self._wrongly_listed(alive)

    async def _wrongly_listed(self, alive: list[Actor]) -> list[str]:
        """Says where the directory's word on who is ready is not the truth."""
        try:
            async with RelayClient(self.cast[DIRECTORY].said["address"]) as client:
                known = map(convert.instance_from_proto, (await client.status()).instances)
        except ClientError as error:
            return [f"directory: {error}"]
        listed = {(i.instance, i.weights.version, i.weights.digest)
                  for i in known if i.state is State.READY}  # fmt: skip
        ready = {
            (a.name, a.said["version"], a.said["digest"])
            for a in alive
            if a.role == "engine" and self._state(a.name) == State.READY
            and self.cast[self._host(a.name)].alive
        }  # fmt: skip
        return [f"the directory lists {listed - ready} and lacks {ready - listed}"] * (
            listed != ready
        )

    def _host(self, name: str) -> str:
        return next(e.relay for e in (*self.plan.seeds, *self.plan.targets) if e.name == name)

    async def _write_stacks(self) -> None:
        for actor in self.cast.values():
            actor.signal(signal.SIGCONT)
            actor.signal(signal.SIGUSR1)
            actor.signal(signal.SIGUSR2)
        await asyncio.sleep(1)

    async def _end(self) -> None:
        """Looks at everybody once more, and ends all processes."""
        for name, actor in self.cast.items():
            if actor.alive and self._state(name) == State.READY and name not in self._liars:
                self._look(actor)
        everyone = [*self._former, *sorted(self.cast.values(), key=lambda a: a.role)]
        for actor in everyone:
            actor.resume()
            code = actor.end()
            if code != 0 and not actor.killed:
                self.wrong.append(f"{actor.name} ended with {code}")

    def _judge(self) -> None:
        for engine in self.plan.targets:
            self.wrong += self._judged(self.cast[engine.name])
        for actor in self.cast.values():
            if "Traceback" in actor.log.read_text("utf-8", "replace"):
                self.wrong.append(f"{actor.name} has a traceback in its log")

    def _judged(self, target: Actor) -> list[str]:
        said, state, found = target.said, self._state(target.name), []
        self.say(f"  {self._story(target)}")
        if target.killed:
            return []
        if state == State.FAILED and not said["reason"]:
            found.append("failed without a reason")
        if state != State.READY and target.name in self.plan.must_fill:
            found.append(f"is {state} though nothing was in its way")
        took = said.get("ended_at", time.monotonic()) - self._began
        if took > DEADLINE_SECONDS + OVERTIME_SECONDS and not target.was_stopped:
            found.append(f"took {took:.1f} s")
        losses = sum(reason != "complete" for *_, reason in said.get("path", ()))
        if said.get("reread", 0) > losses * BLOCKS_PER_LOSS * BLOCK_BYTES:
            found.append(f"read {said['reread']} bytes again, and lost {losses} sources")
        return [f"{target.name} {what}" for what in found]

    def _story(self, target: Actor) -> str:
        said = target.said
        if target.killed:
            return f"{target.name} was killed"
        took = said.get("ended_at", time.monotonic()) - self._began
        how = f"{target.name} {said.get('state')} after {took:.1f} s"
        if "path" not in said:
            return f"{how}: {said.get('reason')}"
        path = "; ".join(f"{source} ({over}): {reason}" for source, over, reason in said["path"])
        mib = f"{said['moved'] >> 20} MiB moved, {said['reread'] >> 20} again"
        return f"{how} with {said['version']}, {mib}: {path}"


def play(plan: Plan, say: Callable[[str], None]) -> tuple[list[str], str]:
    """Plays a plan; returns what was wrong, and if something was, what the processes logged."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(plan, Path(folder), say)
        wrong = asyncio.run(run.play())
        logs = ""
        if wrong:
            for log in sorted(Path(folder).glob("*.log")):
                logs += f"--- {log.name}\n{log.read_text('utf-8', 'replace')}\n"
        return wrong, logs
