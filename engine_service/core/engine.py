"""Admits requests, runs steps, publishes tokens. Plain Python.

One task runs the steps; everything else happens between two of them, so the
bookkeeping needs no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine_service.core.gate import Gate, Ticket
from engine_service.core.ports import Runner
from engine_service.core.prefix import apart
from engine_service.core.request import Finish, GenerationRequest, Sequence, answers_to
from engine_service.core.rows import row_of
from engine_service.core.scheduler import Scheduler
from engine_service.core.step_messages import Row, Sampled
from engine_service.errors import EngineError, NotReady, RankDied, WrongState
from relay_service.core.instance import Weights


class Engine:
    """Turns requests into streams of tokens."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.weights = Weights()
        """Weights that serve; each token is labelled with those of its step."""
        self.gate = Gate(lambda: scheduler.limits.max_waiting - scheduler.queued)
        self._runner = runner
        self._work = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._changed = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._degradations = 0

    def submit(
        self, request: GenerationRequest, answers: int = 1, ticket: Ticket | None = None
    ) -> list[Sequence]:
        """Queues a request; all its answers publish to one queue of events.

        Whoever submits must `end` every answer, whatever happens. One whose `ticket` was
        aborted has ended. Raises `InvalidRequest`, `QueueFull`, `RequestExists`,
        `WrongState` where another version serves than it demands, or `NotReady` where it
        refuses to be answered while experts are lost.
        """
        if ticket and ticket.aborted:
            sequences = answers_to(request, answers)
            self.scheduler.abort(sequences, self.weights)
            return sequences
        if request.weight_version not in ("", self.weights.version):
            raise _another_version(request, self.weights)
        if request.refuses_degraded and self.degraded:
            raise _degraded()
        sequences = self.scheduler.add(request, answers)
        self._work.set()
        return sequences

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """Ends an answer whose caller wants no more; frees its KV and its slot. Twice is harmless.

        Nothing more is published.
        """
        self.scheduler.remove(sequence, finish)
        self.changed()

    def abort(self, request: str) -> int:
        """Ends the answers to a request with what they have; returns how many.

        A request that is only on its way counts as one.
        """
        sequences = self.scheduler.named(request)
        self.scheduler.abort(sequences, self.weights)
        self.changed()
        return len(sequences) + self.gate.abort(request)

    def abort_all(self) -> int:
        """Ends every answer with what it has; returns how many."""
        served = len(self.scheduler.running) + len(self.scheduler.waiting)
        self.scheduler.abort_all(self.weights)
        self.changed()
        return served + self.gate.abort_all()

    def fail_all(self, error: Exception) -> None:
        """Ends every answer with an error, and every request that waits at the gate."""
        self.scheduler.fail_all(error)
        self.gate.fail_all(error)
        self.changed()

    def switch(self, weights: Weights) -> None:
        """Serves with other weights from now on. Within `between_steps` alone.

        Frozen KV without a token is computed anew: nothing would say whose it was. Answers
        that must be of one version, and have tokens, end with what they have; those that
        demand another version, and have none, fail.
        """
        old, self.weights = self.weights, weights
        scheduler = self.scheduler
        scheduler.retract([one for one in scheduler.running if not one.output])
        present = [*scheduler.running, *scheduler.waiting]
        bound = [one for one in present if one.request.one_version or one.request.weight_version]
        scheduler.abort([one for one in bound if one.output], old)
        for one in bound:
            if one.finish or one.request.weight_version in ("", weights.version):
                continue
            if one.leader and one.leader.output:  # an error would end the others, too
                scheduler.abort([one], old)
            else:
                scheduler.fail([one], _another_version(one.request, weights))
        self.changed()

    @property
    def degraded(self) -> bool:
        """Whether tokens are marked: experts are lost, and others serve in their place."""
        return self.scheduler.degraded

    def set_degraded(self, degraded: bool) -> None:  # noqa: FBT001 (a setter)
        """Marks tokens from now on, or no longer. Within `between_steps` alone.

        To be called at every further loss, too: what runs goes back to the queue, and its KV is
        computed anew, so that no token rests on KV of other experts than its own. Requests that
        refuse such tokens fail.
        """
        if not (degraded or self.degraded):
            return
        scheduler = self.scheduler
        scheduler.degraded = degraded
        self._degradations += degraded
        scheduler.retract(scheduler.running)
        if degraded:
            refusing = [one for one in scheduler.waiting if one.request.refuses_degraded]
            scheduler.fail(refusing, _degraded())
        self.changed()

    @property
    def frozen(self) -> bool:
        """Whether no step begins."""
        return not self._thawed.is_set()

    def freeze(self) -> None:
        """Lets no further step begin. `between_steps` waits for the one in work."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Lets steps begin again."""
        if self.frozen:
            self._thawed.set()
            self._work.set()

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Holds the next step back, once the present one has been published."""
        async with self._stepping:
            yield

    async def run(self) -> None:
        """Runs steps for ever. A step that fails ends its own streams with the error.

        Raises `RankDied`: whoever runs it decides what becomes of the streams. It may be run
        again; what was computed last then is as if it had not been.
        """
        self.scheduler.retract(list(self.scheduler.running))
        self._work.set()
        while True:
            await self._thawed.wait()
            async with self._stepping:
                ran = not self.frozen and await self._step()
                self.changed()
            if not ran and not self.frozen:
                await self._work.wait()
            # A step that never waits would keep the readers of its own tokens waiting.
            await asyncio.sleep(0)

    async def idle(self) -> None:
        """Waits until nothing runs and nothing waits."""
        scheduler = self.scheduler
        await self.until(lambda: not scheduler.running and not scheduler.waiting)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds; looks again after every step and every `changed`."""
        while not condition():
            await self._changed.wait()

    def changed(self) -> None:
        """Lets whoever waits in `until` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _step(self) -> bool:
        """Runs a step; returns False when there is nothing to do."""
        weights = apart(self.weights, self._degradations) if self.degraded else self.weights
        batch = self.scheduler.schedule(weights)
        if not batch:
            self._work.clear()
            return False
        batch, rows = self._rows(batch)
        if not rows:
            return True
        try:
            sampled = await self._sample(rows)
        except RankDied:
            raise
        except EngineError as error:
            self.scheduler.fail(batch, error)
        else:
            self.scheduler.commit(batch, sampled, weights)
        return True

    def _rows(self, batch: list[Sequence]) -> tuple[list[Sequence], tuple[Row, ...]]:
        """Returns whoever has a row in the step, and the rows; who can have none fails alone."""
        rows: dict[Sequence, Row] = {}
        for sequence in batch:
            try:
                rows[sequence] = row_of(sequence)
            except EngineError as error:  # the structure of its answer can go no further
                self.scheduler.fail([sequence], error)
        return list(rows), tuple(rows.values())

    async def _sample(self, rows: tuple[Row, ...]) -> Sampled:
        sampled = await self._runner.step(rows)
        if len(sampled.tokens) != len(rows):
            raise RankDied(f"a rank answered {len(sampled.tokens)} tokens for {len(rows)} rows")
        return sampled


def _degraded() -> NotReady:
    return NotReady(
        "experts are lost, and the request refuses answers without them",
        field="refuse_degraded", hint="ask another instance, or again once they are recovered",
    )  # fmt: skip


def _another_version(request: GenerationRequest, weights: Weights) -> WrongState:
    return WrongState(
        f"version {weights.version!r} serves, {request.weight_version!r} is demanded",
        field="weight_version", expected=request.weight_version, found=weights.version,
    )  # fmt: skip
