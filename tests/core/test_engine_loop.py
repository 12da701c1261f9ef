"""Requests become streams of tokens, batched together in one step."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator

import pytest
from fakes import FakeRunner, eventually

from engine_service.core.blocks import BlockPool
from engine_service.core.engine import Engine
from engine_service.core.request import Finish, GenerationRequest, TokenEvent
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Sampled, Sampling
from engine_service.core.versions import Spans
from engine_service.errors import EngineError, InvalidRequest, NonFiniteLogits, RankDied
from relay_service.core.instance import Weights

WEIGHTS = Weights("v1", "digest", 1)


def request(*prompt: int, max_tokens: int = 5) -> GenerationRequest:
    """Returns a greedy request."""
    return GenerationRequest(prompt=prompt, sampling=Sampling(), max_tokens=max_tokens)


async def events_of(engine: Engine, asked: GenerationRequest) -> AsyncGenerator[TokenEvent]:
    """Yields the events of one answer, as its callers would read them."""
    (sequence,) = engine.submit(asked)
    try:
        while True:
            event = await sequence.events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finish:
                return
    finally:
        engine.end(sequence, Finish.ABORT)


class Running:
    """An engine whose steps run."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.scheduler = Scheduler(Limits(1000, 8, 8, 4), BlockPool(64, 4))
        self.engine = Engine(self.scheduler, self.runner)
        self.engine.weights = WEIGHTS
        self.task = asyncio.create_task(self.engine.run())

    async def tokens(self, *prompt: int, max_tokens: int = 5) -> list[int]:
        """Generates to the end."""
        asked = request(*prompt, max_tokens=max_tokens)
        return [event.token async for event in events_of(self.engine, asked)]


@pytest.fixture
async def running():
    """A running engine that is ended at the end."""
    running = Running()
    yield running
    running.task.cancel()
    with contextlib.suppress(asyncio.CancelledError, EngineError):
        await running.task


async def test_a_stream(running):
    """Every token follows its predecessor, and the last event says why it ended."""
    events = [event async for event in events_of(running.engine, request(1, 2, 3, max_tokens=3))]
    assert [(e.token, e.finish) for e in events] == [(4, None), (5, None), (6, Finish.LENGTH)]
    assert {event.weights for event in events} == {WEIGHTS}
    assert running.scheduler.pool.used == 0


async def test_streams_run_together(running):
    """Streams that come while a step runs are batched in the next ones, each with its tokens."""
    running.runner.gate.clear()
    streams = [asyncio.create_task(running.tokens(10 * n, max_tokens=4)) for n in range(1, 6)]
    await running.runner.stepping.wait()
    running.runner.gate.set()
    answers = await asyncio.gather(*streams)
    assert answers == [[10 * n + i for i in range(1, 5)] for n in range(1, 6)]
    assert max(len(rows) for rows in running.runner.steps) == 5
    assert len(running.runner.steps) <= 5


async def test_an_idle_engine_makes_no_steps(running):
    """Without requests nothing runs, and a request that comes later wakes the engine."""
    await running.engine.idle()
    assert running.runner.steps == []
    assert await running.tokens(1, max_tokens=1) == [2]
    await running.engine.idle()
    assert len(running.runner.steps) == 1


async def test_leaving_frees_the_kv(running):
    """Leaving an answer, within a step or between two, frees its KV; others go on."""
    leaving = events_of(running.engine, request(1, max_tokens=500))
    staying = asyncio.create_task(running.tokens(100, max_tokens=50))
    assert (await anext(leaving)).token == 2
    await leaving.aclose()
    assert await staying == list(range(101, 151))
    assert running.scheduler.pool.used == 0


async def test_cancelling_within_a_step(running):
    """A reader that is cancelled while its step runs gets no token any more and holds no KV."""
    running.runner.gate.clear()
    reading = asyncio.create_task(running.tokens(1, max_tokens=500))
    await running.runner.stepping.wait()
    assert running.scheduler.pool.used > 0
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert running.scheduler.pool.used == 0
    running.runner.gate.set()
    assert await running.tokens(5, max_tokens=2) == [6, 7]


async def test_a_dead_rank_ends_the_steps(running):
    """When a rank dies no step runs; with others they may, and the streams go on as if nothing."""
    running.scheduler.limits = Limits(1000, 1, 8, 4)
    running.runner.gate.clear()
    streams = [asyncio.create_task(running.tokens(n)) for n in range(1, 4)]
    await running.runner.stepping.wait()
    running.runner.error = error = RankDied("rank 0 has died")
    running.runner.gate.set()
    await asyncio.wait([running.task])
    assert running.task.exception() is error
    assert not any(stream.done() for stream in streams)
    running.task = asyncio.create_task(running.engine.run())
    for first, stream in enumerate(streams, 1):
        assert await stream == list(range(first + 1, first + 6))
    assert running.scheduler.pool.used == 0


async def test_all_streams_end_with_what_nobody_survived(running):
    """Those that wait, too."""
    running.scheduler.limits = Limits(1000, 1, 8, 4)
    running.runner.gate.clear()
    streams = [asyncio.create_task(running.tokens(n)) for n in range(1, 4)]
    await running.runner.stepping.wait()
    running.engine.fail_all(error := RankDied("rank 0 has died"))
    running.runner.gate.set()
    for result in await asyncio.gather(*streams, return_exceptions=True):
        assert result is error
    assert running.scheduler.pool.used == 0


async def test_a_failed_step_ends_its_own_streams(running):
    """A step that fails ends the streams that were in it; others are served."""
    running.runner.gate.clear()
    in_step = asyncio.create_task(running.tokens(1))
    await running.runner.stepping.wait()
    later = asyncio.create_task(running.tokens(50, max_tokens=2))
    await eventually(lambda: running.scheduler.waiting)
    running.runner.error = NonFiniteLogits("NaN")
    running.runner.gate.set()
    with pytest.raises(NonFiniteLogits):
        await in_step
    assert await later == [51, 52]
    assert not running.task.done()


class Dead:
    """A structure that can go no further."""

    def allowed(self) -> bytes:
        """Finds that out."""
        raise InvalidRequest("too complex")


async def test_a_structure_that_can_go_no_further(running):
    """It ends its own answer, before a step that it has alone and one that it shares."""
    dead = dataclasses.replace(request(1), constraint=Dead())
    with pytest.raises(InvalidRequest, match="too complex"):
        await anext(events_of(running.engine, dead))
    assert running.runner.steps == []
    running.runner.gate.clear()
    beside = asyncio.create_task(running.tokens(10, max_tokens=4))
    await running.runner.stepping.wait()
    failing = asyncio.ensure_future(anext(events_of(running.engine, dead)))
    await eventually(lambda: running.scheduler.waiting)
    running.runner.gate.set()
    with pytest.raises(InvalidRequest):
        await failing
    assert await beside == [11, 12, 13, 14]
    assert running.scheduler.pool.used == 0


@pytest.mark.parametrize("answer", [(), (1, 2, 3)])
async def test_a_step_that_answers_for_others(running, answer):
    """A runner that returns another number of tokens than rows counts as dead."""

    async def step(_rows):
        return Sampled(answer)

    running.runner.step = step
    stream = asyncio.create_task(running.tokens(1))
    with pytest.raises(RankDied, match="tokens for 1 rows"):
        await running.task
    stream.cancel()
    await asyncio.wait([stream])
    assert running.scheduler.pool.used == 0


async def test_a_request_that_cannot_be_served(running):
    """A refused request leaves no trace."""
    with pytest.raises(InvalidRequest):
        await running.tokens()
    assert not running.scheduler.waiting


async def test_a_token_carries_the_weights_of_its_step(running):
    """Tokens of a step are labelled with the weights that served when it began."""
    events = events_of(running.engine, request(1, max_tokens=3))
    seen = [await anext(events)]
    running.runner.gate.clear()
    running.runner.stepping.clear()
    running.engine.weights = Weights("v2", "other", 2)
    running.runner.gate.set()
    seen += [event async for event in events]
    versions = [event.weights.version for event in seen]
    assert versions == sorted(versions)
    assert versions[-1] == "v2"


def test_spans():
    """Spans join neighbours of the same weights and count tokens without gaps."""
    spans = Spans()
    old, new = Weights("v1", "a", 1), Weights("v2", "b", 2)
    assert spans.tokens == 0
    for weights in (old, old, new, old):
        spans.add(weights)
    found = [(s.weights.version, s.start, s.end) for s in spans.spans]
    assert found == [("v1", 0, 2), ("v2", 2, 3), ("v1", 3, 4)]
    assert spans.tokens == 4


async def test_a_request_that_could_not_be_prepared(running):
    """Nothing is left of a request whose preparation failed: there is nothing to abort."""

    def prepare() -> None:
        with running.engine.gate.expecting("r"):
            assert running.engine.abort("r") == 1
            raise InvalidRequest("not like this")

    with pytest.raises(InvalidRequest):
        prepare()
    assert running.engine.abort("r") == 0
