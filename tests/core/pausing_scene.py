"""An engine without a model, its pauser, and its callers; in virtual time, a second per step."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator

from virtual_time import virtually

from engine_service.core.blocks import BlockPool
from engine_service.core.engine import Engine
from engine_service.core.lifecycle import Lifecycle
from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.core.pausing import Pauser
from engine_service.core.request import Finish, GenerationRequest, TokenEvent
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Row, Sampled, Sampling
from engine_service.errors import EngineError
from relay_service.core.instance import State, Weights

BLOCK_TOKENS = 4
STEP_SECONDS = 1.0


class KvRunner:
    """Samples the last token plus one, and remembers whose weights wrote each KV slot."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._slots: dict[int, tuple[int, Weights]] = {}
        self.in_step = False
        self.rows = 0

    async def step(self, rows: tuple[Row, ...]) -> Sampled:
        """Takes a second. Nothing may forbid it, and every KV slot that it reads must be right."""
        self._scene.check_may_step()
        self.in_step = True
        self.rows += len(rows)
        await asyncio.sleep(STEP_SECONDS)
        for row in rows:
            self._compute(row)
        self.in_step = False
        return Sampled(tuple(row.tokens[-1] + 1 if row.samples else -1 for row in rows))

    def _compute(self, row: Row) -> None:
        engine = self._scene.engine
        running = {tuple(one.blocks): one for one in engine.scheduler.running}
        owner = running.get(row.blocks)
        for position in range(row.position + len(row.tokens)):
            slot = row.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            if position >= row.position:
                self._slots[slot] = row.tokens[position - row.position], engine.weights
            elif owner:  # it may have left during the step
                token, weights = self._slots[slot]
                assert (token,) == owner.part(position, position + 1), "KV of other tokens"
                self._scene.check_may_read(owner.request.request, weights)


class Caller:
    """A request and what came of it."""

    def __init__(self, name: str, prompt: int, max_tokens: int, *, one_version: bool) -> None:
        self.name = name
        self.request = GenerationRequest(
            prompt=tuple(range(prompt)), sampling=Sampling(), max_tokens=max_tokens,
            request=name, one_version=one_version,
        )  # fmt: skip
        self.events: list[TokenEvent] = []
        self.error: EngineError | None = None
        self.left = False
        self.task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens so far."""
        return [event.token for event in self.events if event.token is not None]

    @property
    def versions(self) -> list[str]:
        """Version of each token."""
        return [event.weights.version for event in self.events if event.token is not None]

    @property
    def finish(self) -> Finish | None:
        """How it ended."""
        return self.events[-1].finish if self.events else None


class Scene:
    """A running instance."""

    def __init__(self, max_running: int = 4, blocks: int = 64, chunk: int = 32) -> None:
        limits = Limits(1000, max_running, 8, BLOCK_TOKENS, chunk)
        self.scheduler = Scheduler(limits, BlockPool(blocks, BLOCK_TOKENS))
        self.runner = KvRunner(self)
        self.engine = Engine(self.scheduler, self.runner)
        self.engine.weights = Weights("v1", "d1", 1)
        self.lifecycle = Lifecycle()
        self.lifecycle.state = State.READY
        self.trims = 0
        self.pauser = Pauser(self.engine, self.lifecycle, self._trim)
        self.callers: dict[str, Caller] = {}
        self.applying = False
        self.paused = False
        """Whether a pause has succeeded and nobody has continued since."""
        self.waits = 0
        """Calls that let requests finish."""
        self.stepping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Lets steps run."""
        self.stepping = asyncio.ensure_future(self.engine.run())

    def ask(
        self, name: str, prompt: int = 5, max_tokens: int = 10, *, one_version: bool = False
    ) -> Caller:
        """Sends a request."""
        caller = self.callers[name] = Caller(name, prompt, max_tokens, one_version=one_version)
        caller.task = asyncio.ensure_future(self._serve(caller))
        return caller

    async def pause(self, mode: PauseMode, **how):
        """Pauses, and remembers that it has."""
        self.waits += mode is PauseMode.WAIT
        try:
            report = await self.pauser.pause(PauseRequest(mode, **how))
        finally:
            self.waits -= mode is PauseMode.WAIT
        self.paused = True
        return report

    async def resume(self, **how):
        """Continues, and remembers that it has."""
        report = await self.pauser.resume(**how)
        self.paused = False
        return report

    @contextlib.asynccontextmanager
    async def update(self, mode: PauseMode, **how) -> AsyncIterator[None]:
        """Applies the next version."""
        self.waits += mode is PauseMode.WAIT
        try:
            async with self.pauser.applying(PauseRequest(mode, **how)) as report:
                assert not self.runner.in_step, "a commit began within a step"
                assert self.lifecycle.state is State.UPDATING
                self.applying = True
                try:
                    yield report
                    epoch = self.engine.weights.epoch + 1
                    self.engine.switch(Weights(f"v{epoch}", f"d{epoch}", epoch))
                finally:
                    self.applying = False
        finally:
            self.waits -= mode is PauseMode.WAIT

    async def updated(self, mode: PauseMode, seconds: float = 0.0, **how):
        """Applies the next version, which takes so many seconds."""
        async with self.update(mode, **how) as report:
            await asyncio.sleep(seconds)
        return report

    def check_may_step(self) -> None:
        """Fails where no step may begin."""
        assert not self.applying, "a step while weights are applied"
        assert not self.paused or self.waits, "a step while paused"
        assert not self.runner.in_step

    def check_may_read(self, name: str, weights: Weights) -> None:
        """KV of other weights is read by answers alone that say so: with tokens of those."""
        if weights != self.engine.weights:
            assert weights.version in self.callers[name].versions, f"{name} reads old KV"

    async def close(self) -> None:
        """Ends it. Whatever went wrong in a step is raised."""
        self.stepping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.stepping

    async def over(self) -> None:
        """Waits until every caller has an end, and every KV block is free."""
        await asyncio.wait([caller.task for caller in self.callers.values()])
        assert self.scheduler.pool.used == 0

    async def _serve(self, caller: Caller) -> None:
        """Goes the way of a request, as `rpc.admission` does."""
        sequences = []
        try:
            with self.engine.gate.expecting(caller.name) as ticket:
                async with self.pauser.admission(ticket):
                    await asyncio.sleep(0.1)  # tokenizing
                    sequences = self.engine.submit(caller.request, 1, ticket)
            while caller.finish is None:
                event = await sequences[0].events.get()
                if isinstance(event, Exception):
                    raise event
                caller.events.append(event)
        except EngineError as error:
            caller.error = error
        finally:
            caller.left = caller.finish is None
            for sequence in sequences:
                self.engine.end(sequence, Finish.ABORT)

    async def _trim(self) -> tuple[int, int]:
        self.trims += 1
        return 100, 60


def played(test):
    """Runs a test of a `scene` in virtual time."""

    @functools.wraps(test)
    def run(scene: Scene, **parameters):
        async def play() -> None:
            scene.begin()
            try:
                await test(scene, **parameters)
            finally:
                await scene.close()

        virtually(play())

    return run


def by_name(report) -> dict[str, int]:
    """Returns the counts of a report that are not zero."""
    return {name: n for name, n in dataclasses.asdict(report.requests).items() if n}
