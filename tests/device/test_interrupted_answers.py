"""Answers of a real model are the same however often pauses interrupt them."""

import asyncio

import pytest
from tiny_llama import BLOCK_TOKENS

from engine_service.core.blocks import BlockPool
from engine_service.core.engine import Engine
from engine_service.core.lifecycle import Lifecycle
from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.core.pausing import Pauser
from engine_service.core.request import Finish, GenerationRequest, TokenEvent
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Sampling
from relay_service.core.instance import State, Weights

PROMPTS = (tuple(range(3, 40)), (7, 8, 9))
TOKENS = 64


class Interrupted:
    """Steps of a rank; in some of them somebody pauses, and continues when all is still."""

    def __init__(self, rank, at: tuple[int, ...], mode: PauseMode) -> None:
        self._rank, self._at, self._mode = rank, at, mode
        self._steps = 0
        self._pauses: list[asyncio.Task] = []
        limits = Limits(128, 4, 4, BLOCK_TOKENS, 16)
        self.engine = Engine(Scheduler(limits, BlockPool(32, BLOCK_TOKENS)), self)
        self.engine.weights = Weights("v1", "digest", 1)
        lifecycle = Lifecycle()
        lifecycle.state = State.READY
        self.pauser = Pauser(self.engine, lifecycle, self._trim)

    async def step(self, rows):
        """Runs a step, during which a pause may come."""
        if self._steps in self._at:
            self._pauses.append(asyncio.ensure_future(self._pause()))
            await asyncio.sleep(0)
        self._steps += 1
        return self._rank.step(rows)

    async def answers(self) -> list[list[TokenEvent]]:
        """Returns the events of an answer to each prompt."""
        stepping = asyncio.ensure_future(self.engine.run())
        found = await asyncio.gather(*map(self._answer, PROMPTS))
        await asyncio.gather(*self._pauses)
        assert len(self._pauses) == len(self._at)
        stepping.cancel()
        await asyncio.wait([stepping])
        return found

    async def _pause(self) -> None:
        report = await self.pauser.pause(PauseRequest(self._mode))
        let_go = report.requests.retracted + report.requests.paused
        assert let_go == len(self.engine.scheduler.begun) > 0
        if self._mode is PauseMode.RETRACT:
            assert (self.engine.scheduler.pool.used, self.engine.scheduler.pool.cached) == (0, 0)
        await self.pauser.resume()

    async def _answer(self, prompt) -> list[TokenEvent]:
        sampling = Sampling(logprobs=2, prompt_logprobs=1)
        asked = GenerationRequest(prompt=prompt, sampling=sampling, max_tokens=TOKENS)
        (sequence,) = self.engine.submit(asked)
        events = []
        while not events or events[-1].finish is None:
            events.append(await sequence.events.get())
        self.engine.end(sequence, Finish.ABORT)
        return events

    async def _trim(self) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.KEEP])
@pytest.mark.parametrize("at", [(0,), (1,), (2,), (17,), (63,), (1, 2, 30)])
async def test_tokens_and_logprobs(captured, mode, at):
    """Tokens, log-probabilities, those of the prompt, and counts are those of no pause at all."""
    expected = await Interrupted(captured, (), mode).answers()
    found = await Interrupted(captured, at, mode).answers()
    for prompt, one, other in zip(PROMPTS, expected, found, strict=True):
        assert [e.token for e in other] == [e.token for e in one]
        assert len(other) == TOKENS
        assert [e.finish for e in other] == [None] * (TOKENS - 1) + [Finish.LENGTH]
        assert _all(other) == pytest.approx(_all(one), abs=1e-4)
        assert [len(e.prompt_logprobs) for e in other] == [len(prompt) - 1] + [0] * (TOKENS - 1)
        assert all(e.reused <= len(prompt) for e in other)


def _all(events: list[TokenEvent]) -> list[float]:
    positions = [p for e in events for p in (*e.prompt_logprobs, e.logprobs)]
    return [value for p in positions for value in (p.logprob, *(lp for _, lp in p.top))]
