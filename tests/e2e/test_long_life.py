"""An engine that has served much, or anything, serves on as if it had just begun."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import Fleet, Stage, answer, health, reach, request, status_of

from clients.engine import EngineClient
from clients.errors import ClientError
from clients.launch import Service
from seedrelay.v1 import engine_pb2

SERVICE = "seedrelay.v1.EngineService"
STREAMS = 64
WAVES = 9
AFTERWARDS = request(max_tokens=4)
POOLED_THREADS = 8
"""Pools of a few threads fill as they are needed; a leak would be as many as requests."""


async def test_much_traffic_leaves_nothing(stage: Stage, model: Path) -> None:
    """Many streams at once, again and again, leave the processes as they were."""
    engine = stage.engine(model)
    pids = [engine.pid, (await reach(engine)).ranks[0].pid]
    expected = await answer(engine)
    async with EngineClient(engine.address) as client:

        async def ask(number: int) -> list[int]:
            asked = request(text=f"{number} seeds", max_tokens=4)
            return [t async for message in client.generate(asked) for t in message.token_ids]

        await asyncio.gather(*map(ask, range(STREAMS)))
        before = {pid: _held(pid) for pid in pids}
        for _ in range(WAVES):
            await asyncio.gather(*map(ask, range(STREAMS)))
    assert await answer(engine) == expected
    status = await status_of(engine)
    assert (status.kv_blocks_used, status.running, status.waiting) == (0, 0, 0)
    for pid in pids:
        descriptors, threads, resident = _held(pid)
        assert descriptors <= before[pid][0] + 1  # this test's own connection
        assert threads <= before[pid][1] + POOLED_THREADS
        assert resident - before[pid][2] < 32 << 20


async def test_health_during_a_long_prefill(stage: Stage, make_model: Callable[..., Path]) -> None:
    """While a prompt of thousands of tokens is read, health answers, and a stream goes on."""
    model = make_model("long", hidden_size=256, layers=6, vocab_size=4096)
    engine = stage.engine(model, "--kv-cache-tokens", "20000", "--prefill-chunk-tokens", "256")
    limit = (await reach(engine)).limits.max_context_tokens
    long = engine_pb2.GenerateRequest(
        tokens=engine_pb2.TokenPrompt(token_ids=[7 * n % 4000 for n in range(limit - 8)]),
        sampling=engine_pb2.SamplingParams(max_tokens=1, ignore_eos=True),
    )
    meanwhile = 0
    async with EngineClient(engine.address) as client:
        running = client.generate(request(max_tokens=1500))
        await anext(running)
        reading = asyncio.ensure_future(answer(engine, long))
        while not reading.done():
            assert await health(engine, SERVICE) == "SERVING"
            await anext(running)
            meanwhile += 1
        await running.aclose()
    assert len(await reading) == 1
    assert meanwhile >= limit // 256 // 2


numbers = st.one_of(st.integers(-3, 40), st.integers(-(1 << 31), (1 << 31) - 1))
floats = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0]), st.floats(width=32, allow_nan=True))
texts = st.text(max_size=8)
structures = st.one_of(
    st.none(),
    st.builds(engine_pb2.Structure, regex=st.text("ab()[]*+|\\", max_size=8)),
    st.builds(engine_pb2.Structure, json_schema=st.sampled_from(["{}", "{", "[]", '{"a": 1}'])),
    st.builds(engine_pb2.Structure, grammar=st.text('start:"ab| \n', max_size=12)),
)
samplings = st.builds(
    engine_pb2.SamplingParams,
    max_tokens=st.integers(-2, 12), temperature=floats, top_k=numbers, top_p=floats, min_p=floats,
    seed=st.none() | st.integers(0, (1 << 64) - 1), stop_token_ids=st.lists(numbers, max_size=3),
    ignore_eos=st.booleans(), min_tokens=st.integers(-1, 12), stop=st.lists(texts, max_size=3),
    include_stop=st.booleans(), presence_penalty=floats, frequency_penalty=floats,
    repetition_penalty=floats, logit_bias=st.dictionaries(numbers, floats, max_size=3),
    logprobs=st.none() | numbers, prompt_logprobs=st.none() | numbers, n=st.integers(-1, 4),
    structure=structures,
)  # fmt: skip
prompts = st.one_of(
    st.just({}),
    st.builds(lambda text: {"text": text}, texts),
    st.builds(lambda ids: {"tokens": {"token_ids": ids}}, st.lists(numbers, max_size=6)),
    st.builds(lambda ids: {"tokens": {"token_ids": ids}}, st.lists(st.integers(0, 4095))),
    st.builds(lambda text: {"chat": {"messages": [{"role": text, "content": text}]}}, texts),
)


@settings(max_examples=150)
@given(prompts, samplings, texts, numbers)
def test_any_request_is_answered_or_refused(fleet, expected, prompt, sampling, name, priority):
    """Whatever is asked gets an answer or INVALID_ARGUMENT, and the next one is served."""
    asked = engine_pb2.GenerateRequest(**prompt, sampling=sampling, request=name, priority=priority)
    asyncio.run(_ask_anything(fleet.seed, asked, expected))


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[int]:
    """What an undisturbed engine answers."""
    return asyncio.run(answer(fleet.seed, AFTERWARDS))


async def _ask_anything(
    engine: Service, asked: engine_pb2.GenerateRequest, expected: list[int]
) -> None:
    async with EngineClient(engine.address) as client:
        try:
            ends = [m async for m in client.generate(asked) if m.finish_reason]
        except ClientError as error:
            assert error.code == "INVALID_ARGUMENT", error  # noqa: PT017 (an answer is fine too)
        else:
            assert len(ends) == (asked.sampling.n or 1)
    assert await answer(engine, AFTERWARDS) == expected


def _held(pid: int) -> tuple[int, int, int]:
    """Returns the descriptors, the threads and the resident bytes of a process."""
    process = Path(f"/proc/{pid}")
    descriptors = len(list((process / "fd").iterdir()))
    threads = len(list((process / "task").iterdir()))
    pages = int((process / "statm").read_text().split()[1])
    return descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE")
