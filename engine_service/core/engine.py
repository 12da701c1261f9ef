"""Admits requests, runs steps, publishes tokens. Plain Python.

One task runs the steps; everything else happens between two of them, so the
bookkeeping needs no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from engine_service.core.messages import Row, Sampled
from engine_service.core.ports import Runner
from engine_service.core.request import Finish, GenerationRequest, Sequence
from engine_service.core.rows import row_of
from engine_service.core.scheduler import Scheduler
from engine_service.errors import EngineError, RankDied
from relay_service.core.instance import Weights


class Engine:
    """Turns requests into streams of tokens."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.weights = Weights()
        """Weights that serve; each token is labelled with those of its step."""
        self._runner = runner
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._expected: dict[str, bool] = {}
        """Requests on their way, by name: whether somebody has ended them already."""

    @contextmanager
    def expecting(self, request: str) -> Iterator[None]:
        """Lets a request be aborted while it is prepared; whoever prepares it submits it at once.

        Nothing is left of it when preparing fails.
        """
        self._expected[request] = False
        try:
            yield
        except BaseException:
            self._expected.pop(request, None)
            raise

    def submit(self, request: GenerationRequest, answers: int = 1) -> list[Sequence]:
        """Queues a request; all its answers publish to one queue of events.

        Whoever submits must `end` every answer, whatever happens. Raises `InvalidRequest`,
        `QueueFull` or `RequestExists`.
        """
        aborted = self._expected.pop(request.request, False)
        sequences = self.scheduler.add(request, answers)
        if aborted:
            self.scheduler.abort(sequences, self.weights)
        self._work.set()
        self._idle.clear()
        return sequences

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """Ends an answer whose caller wants no more; frees its KV and its slot. Twice is harmless.

        Nothing more is published.
        """
        self.scheduler.remove(sequence, finish)

    def abort(self, request: str) -> int:
        """Ends the answers to a request with what they have; returns how many.

        A request that is only expected counts as one, and ends when it is submitted.
        """
        if request and request in self._expected:
            self._expected[request] = True
            return 1
        sequences = self.scheduler.named(request)
        self.scheduler.abort(sequences, self.weights)
        return len(sequences)

    def switch(self, weights: Weights) -> None:
        """Makes other weights those that serve from now on."""
        self.weights = weights

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Holds the next step back, once the present one has been published."""
        async with self._stepping:
            yield

    async def run(self) -> None:
        """Runs steps for ever. A step that fails ends its own streams with the error.

        Raises `RankDied`, after all streams have ended.
        """
        try:
            while True:
                async with self._stepping:
                    ran = await self._step()
                if not ran:
                    await self._work.wait()
                # A step that never waits would keep the readers of its own tokens waiting.
                await asyncio.sleep(0)
        except RankDied as error:
            self.scheduler.fail_all(error)
            self._idle.set()
            raise

    async def idle(self) -> None:
        """Waits until nothing runs and nothing waits."""
        await self._idle.wait()

    async def _step(self) -> bool:
        """Runs a step; returns False when there is nothing to do."""
        weights = self.weights
        batch = self.scheduler.schedule(weights)
        if not batch:
            self._work.clear()
            self._idle.set()
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
