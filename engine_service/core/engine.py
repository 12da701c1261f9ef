"""Admits requests, runs steps, publishes tokens. Plain Python.

One task runs the steps; everything else happens between two of them, so the
bookkeeping needs no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from engine_service.core.ports import Runner
from engine_service.core.request import Finish, GenerationRequest, Sequence, TokenEvent
from engine_service.core.scheduler import Scheduler, row_of
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

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        """Streams the tokens of a request. Leaving the iterator frees its KV and its slot.

        Raises `InvalidRequest`, `QueueFull`, or what ended the engine.
        """
        sequence = self.scheduler.add(request)
        self._work.set()
        self._idle.clear()
        try:
            while True:
                event = await sequence.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish:
                    return
        finally:
            self.scheduler.remove(sequence, Finish.ABORT)

    async def run(self) -> None:
        """Runs steps for ever. A step that fails ends its own streams with the error.

        Raises `RankDied`, after all streams have ended.
        """
        try:
            while True:
                await self._step()
        except RankDied as error:
            self.scheduler.fail_all(error)
            self._idle.set()
            raise

    async def idle(self) -> None:
        """Waits until nothing runs and nothing waits."""
        await self._idle.wait()

    async def _step(self) -> None:
        batch = self.scheduler.schedule()
        if not batch:
            self._work.clear()
            self._idle.set()
            await self._work.wait()
            return
        weights = self.weights
        try:
            tokens = await self._tokens_of(batch)
        except RankDied:
            raise
        except EngineError as error:
            self.scheduler.fail(batch, error)
        else:
            self.scheduler.commit(batch, tokens, weights)
        # A step that never waits would keep the readers of its own tokens waiting.
        await asyncio.sleep(0)

    async def _tokens_of(self, batch: list[Sequence]) -> tuple[int, ...]:
        tokens = await self._runner.step(tuple(row_of(s) for s in batch))
        if len(tokens) != len(batch):
            raise RankDied(f"a rank answered {len(tokens)} tokens for {len(batch)} rows")
        return tokens
