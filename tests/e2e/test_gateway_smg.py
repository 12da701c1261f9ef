"""The real gateway before real engines, asked by the real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from gateways import Gateway
from stage import PROMPT, Stage, eventually, reach, status_of

from clients.launch import Service
from engine_service.checkpoint import smollm2

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass
class Front:
    """A gateway, the engine behind it, and the model's name."""

    gateway: Gateway
    engine: Service
    model: str


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """The real model behind a gateway, which was started before the engine was ready."""
    folder = tmp_path_factory.mktemp("gateway")
    stage = Stage(folder)
    engine = stage.engine(smollm2.fetch("float32").path)
    gateway = Gateway(folder / "gateway.log", [engine.address])
    try:
        model = asyncio.run(reach(engine)).model
        asyncio.run(gateway.ready(model))
        yield Front(gateway, engine, model)
    finally:
        gateway.close()
        stage.close()


@pytest.fixture
async def ask(front: Front) -> AsyncIterator[Callable[..., Any]]:
    """Asks the question, greedily; settings may be added or changed."""
    async with front.gateway.client() as client:
        fixed = {"model": front.model, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        yield lambda **changes: client.chat.completions.create(**(fixed | changes))


async def test_a_chat(ask: Callable[..., Any]) -> None:
    """The gateway renders the chat, the engine answers and stops, and the counts are right."""
    said = await ask()
    (choice,) = said.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (37, 8)


async def test_a_streamed_chat(ask: Callable[..., Any]) -> None:
    """Streaming, the same text comes token by token, then the reason, then the counts."""
    stream = await ask(stream=True, stream_options={"include_usage": True})
    events = [event async for event in stream]
    pieces = [c.delta.content for event in events for c in event.choices if c.delta.content]
    assert ("".join(pieces), len(pieces)) == (ANSWER, 7)
    reasons = [c.finish_reason for event in events for c in event.choices if c.finish_reason]
    assert reasons == ["stop"]
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (37, 8)


async def test_an_unset_temperature(ask: Callable[..., Any]) -> None:
    """Without a temperature answers are drawn: seeds differ, and each repeats itself."""
    drawn = [await ask(temperature=openai.omit, seed=seed, max_tokens=4) for seed in (1, 2, 1)]
    first, other, again = (one.choices[0].message.content for one in drawn)
    assert first == again
    assert first != other


async def test_several_answers(ask: Callable[..., Any]) -> None:
    """Each of `n` answers is a draw of its own."""
    said = await ask(n=2, temperature=1.0, seed=5, max_tokens=4)
    texts = [choice.message.content for choice in said.choices]
    assert [choice.index for choice in said.choices] == [0, 1]
    assert texts[0] != texts[1]


async def test_logprobs(ask: Callable[..., Any]) -> None:
    """A greedy token is the likeliest one, and the next likeliest stands beside it."""
    said = await ask(logprobs=True, top_logprobs=2, max_tokens=3)
    positions = said.choices[0].logprobs.content
    assert [position.token for position in positions] == ["The", " capital", " of"]
    for position in positions:
        best, second = position.top_logprobs
        assert (best.token, best.logprob) == (position.token, position.logprob)
        assert second.logprob < best.logprob < 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text(ask: Callable[..., Any], stream: bool) -> None:  # noqa: FBT001
    """A stop text ends an answer and is not shown, streamed or not."""
    said = await ask(stop=["France"], stream=stream)
    if stream:
        text = "".join([e.choices[0].delta.content or "" async for e in said if e.choices])
    else:
        text = said.choices[0].message.content
        assert (said.choices[0].finish_reason, said.choices[0].matched_stop) == ("stop", "France")
    assert text == "The capital of "


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "city", "schema": CITY, "strict": True}}},
        pytest.param({"extra_body": {"regex": r'\{"city": "[A-Z][a-z]{1,8}"\}'}},
                     marks=pytest.mark.full),
        pytest.param({"extra_body": {"ebnf": 'root ::= "{\\"city\\": \\"" [a-z]+ "\\"}"'}},
                     marks=pytest.mark.full),
    ],
    ids=["json_schema", "regex", "gbnf"],
)  # fmt: skip
async def test_structure(ask: Callable[..., Any], asked: dict[str, Any]) -> None:
    """An answer that must have a structure has it."""
    said = await ask(**asked, max_tokens=32)
    assert said.choices[0].finish_reason == "stop"
    assert list(json.loads(said.choices[0].message.content)) == ["city"]


async def test_a_completion(front: Front) -> None:
    """A plain text is continued as the engine's own service continues it."""
    async with front.gateway.client() as client:
        said = await client.completions.create(
            model=front.model, prompt="The sea is", max_tokens=6, temperature=0
        )
    (choice,) = said.choices
    assert (choice.text, choice.finish_reason) == (" a place of endless wonder and", "length")
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (3, 6)


async def test_what_is_refused(ask: Callable[..., Any]) -> None:
    """A request that the engine refuses is a client's error over HTTP, with the engine's words."""
    with pytest.raises(openai.BadRequestError, match="structure cannot be used"):
        await ask(extra_body={"regex": "("})


async def test_a_client_that_leaves(front: Front, ask: Callable[..., Any]) -> None:
    """When a client drops its stream, the gateway aborts, and the engine frees slot and KV."""
    before = await status_of(front.engine)
    stream = await ask(stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    assert (await status_of(front.engine)).running == 1
    await stream.close()

    async def is_free() -> bool:
        now = await status_of(front.engine)
        return (now.running, now.kv_blocks_used) == (0, before.kv_blocks_used)

    await eventually(is_free)
    assert (await ask()).choices[0].message.content == ANSWER


async def test_flushing_the_cache(front: Front, ask: Callable[..., Any]) -> None:
    """The gateway's flush empties the prefix cache, and nothing else."""
    await ask(max_tokens=1)
    again = await ask(max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    async with front.gateway.client() as client:
        flushed = await client.post(f"{front.gateway.url}/flush_cache", cast_to=object)
    assert flushed["workers_flushed"] == 1
    assert (await status_of(front.engine)).kv_blocks_cached == 0
    said = await ask(max_tokens=1)
    assert said.usage.prompt_tokens_details.cached_tokens == 0


async def test_one_of_two_engines_dies(stage: Stage, model: Path) -> None:
    """Behind a gateway, one engine goes on when another is killed."""
    engines = [stage.engine(model) for _ in range(2)]
    for engine in engines:
        await reach(engine)
    options = ("--policy", "round_robin", "--health-check-interval-secs", "1")
    gateway = Gateway(stage.folder / "gateway.log", [e.address for e in engines], *options)
    try:
        await gateway.ready(model.name)
        async with gateway.client() as client:

            async def complete() -> int:
                said = await client.completions.create(
                    model=model.name, prompt=PROMPT, max_tokens=8, temperature=0,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                return said.usage.completion_tokens

            async def both_have_served() -> bool:
                await complete()
                states = [await status_of(engine) for engine in engines]
                return all(state.kv_blocks_cached for state in states)

            await eventually(both_have_served)
            engines[0].kill()
            assert [await complete() for _ in range(4)] == [8] * 4
    finally:
        gateway.close()
