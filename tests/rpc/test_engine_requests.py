"""What a caller may ask of an answer, what comes of it, and what is refused."""

import asyncio
import contextlib
import dataclasses
import json
import random
import threading

import pytest
from engines import CONTEXT, EOS, VOCAB, tokens
from fakes import eventually

from clients.errors import CallFailed
from seedrelay.v1 import engine_pb2


@pytest.mark.parametrize(
    ("sampling", "count", "finish"),
    [
        ({"max_tokens": 50}, 5, engine_pb2.FINISH_REASON_STOP),
        ({"max_tokens": 7, "ignore_eos": True}, 7, engine_pb2.FINISH_REASON_LENGTH),
        ({"stop_token_ids": [247]}, 2, engine_pb2.FINISH_REASON_STOP),
        ({"stop_token_ids": [248], "ignore_eos": True}, 3, engine_pb2.FINISH_REASON_STOP),
    ],
)
async def test_stops(service, sampling, count, finish):
    """Answers end at the model's end tokens unless ignored, and at the caller's stop ids."""
    chunks = await service.answer(**tokens(245, **sampling))
    assert len(chunks) == count
    assert chunks[-1].finish_reason == finish


async def test_an_end_token_has_no_text(service):
    """The token that ends an answer is counted and not shown."""
    (chunk,) = await service.answer(**tokens(96, stop_token_ids=[97]))
    assert (list(chunk.token_ids), chunk.text) == ([97], "")


async def test_zero_means_the_default(service):
    """Without a number of tokens an answer goes on to 128, or here to the end of the context."""
    chunks = await service.answer(tokens={"token_ids": [1]})
    assert len(chunks) == CONTEXT - 1


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"tokens": {}}, "prompt"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, "chat"),
        (tokens(-1), "tokens.token_ids"),
        (tokens(VOCAB), "tokens.token_ids"),
        (tokens((1 << 31) - 1), "tokens.token_ids"),
        (tokens(-(1 << 31)), "tokens.token_ids"),
        (tokens(*[1] * CONTEXT), "prompt"),
        (tokens(*[1] * 100_000), "prompt"),
        (tokens(1, max_tokens=-1), "sampling.max_tokens"),
        (tokens(1, max_tokens=10**9), "sampling.max_tokens"),
        (tokens(1, max_tokens=(1 << 31) - 1), "sampling.max_tokens"),
        (tokens(1, temperature=float("nan")), "sampling.temperature"),
        (tokens(1, temperature=float("inf")), "sampling.temperature"),
        (tokens(1, temperature=-0.1), "sampling.temperature"),
        (tokens(1, temperature=100.5), "sampling.temperature"),
        (tokens(1, top_k=-1), "sampling.top_k"),
        (tokens(1, top_p=float("nan")), "sampling.top_p"),
        (tokens(1, top_p=1.5), "sampling.top_p"),
        (tokens(1, top_p=-0.5), "sampling.top_p"),
        (tokens(1, min_p=-0.1), "sampling.min_p"),
        (tokens(1, min_p=1.1), "sampling.min_p"),
        (tokens(1, stop_token_ids=[-1]), "sampling.stop_token_ids"),
        (tokens(1, stop_token_ids=[VOCAB]), "sampling.stop_token_ids"),
        (tokens(1, stop_token_ids=[(1 << 31) - 1]), "sampling.stop_token_ids"),
        (tokens(1, stop=[""]), "sampling.stop"),
        (tokens(1, stop=["x"] * 17), "sampling.stop"),
        (tokens(1, min_tokens=4), "sampling.min_tokens"),
        (tokens(1, min_tokens=-1), "sampling.min_tokens"),
        (tokens(1, presence_penalty=2.1), "sampling.presence_penalty"),
        (tokens(1, frequency_penalty=float("nan")), "sampling.frequency_penalty"),
        (tokens(1, repetition_penalty=-1), "sampling.repetition_penalty"),
        (tokens(1, logit_bias={VOCAB: 1}), "sampling.logit_bias"),
        (tokens(1, logit_bias={-1: 1}), "sampling.logit_bias"),
        (tokens(1, logit_bias={(1 << 31) - 1: 1}), "sampling.logit_bias"),
        (tokens(1, logit_bias={1: 101}), "sampling.logit_bias"),
        (tokens(1, logit_bias={1: float("nan")}), "sampling.logit_bias"),
        (tokens(1, logprobs=21), "sampling.logprobs"),
        (tokens(1, prompt_logprobs=-1), "sampling.prompt_logprobs"),
        (tokens(1, n=-1), "sampling.n"),
        (tokens(1, n=129), "sampling.n"),
        (tokens(1, n=3), "sampling.n"),
        (tokens(1, structure={"regex": "("}), "sampling.structure.regex"),
        (tokens(1, structure={"choice": {}}), "sampling.structure.choice"),
    ],
)
async def test_bad_input(service, request_, field):
    """Bad input is refused by its field, and the next call on the channel is served."""
    with pytest.raises(CallFailed) as refused:
        await service.answer(**request_)
    assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert refused.value.details["field"] == field
    assert (service.scheduler.pool.used, service.scheduler.running) == (0, [])
    assert len(await service.answer(**tokens(1))) == 3


async def test_the_edges_of_good_input(service):
    """The last token id, the longest prompt and the extremes of sampling are served."""
    assert len(await service.answer(**tokens(VOCAB - 1))) == 3
    assert len(await service.answer(**tokens(*[1] * (CONTEXT - 1)))) == 1
    extremes = {"temperature": 100, "top_k": 1 << 30, "top_p": 1, "min_p": 1, "seed": (1 << 64) - 1}
    assert len(await service.answer(**tokens(1, **extremes))) == 3
    sampled = service.ranks.steps[-1][0].sampling
    assert (sampled.seed, sampled.top_p) == ((1 << 64) - 1, 1.0)


async def test_a_request_beyond_the_message_limit(service):
    """A request that is too large is refused with the limit, and the channel goes on."""
    with pytest.raises(CallFailed, match=str(4 << 20)) as refused:
        await service.answer(text="x" * (5 << 20))
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    assert len(await service.answer(**tokens(1))) == 3


async def text_of(service, **request) -> tuple[str, engine_pb2.GenerateResponse]:
    """Returns the whole text of an answer, and its last message."""
    chunks = await service.answer(**request)
    return "".join(chunk.text for chunk in chunks), chunks[-1]


@pytest.mark.parametrize(
    ("sampling", "text", "stop"),
    [
        ({"stop": ["ef"]}, "bcd", "ef"),
        ({"stop": ["ef"], "include_stop": True}, "bcdef", "ef"),
        ({"stop": ["ex", "hi"]}, "bcdefg", "hi"),
        ({"stop": ["cd"], "min_tokens": 6}, "bcdefghijk", ""),
        ({"stop": ["k?"]}, "bcdefghijk", ""),
    ],
)
async def test_stop_texts(service, sampling, text, stop):
    """A stop text ends the answer across tokens, and its end says which; a near miss is shown."""
    found, last = await text_of(service, text="a", sampling={"max_tokens": 10} | sampling)
    assert (found, last.stop_text) == (text, stop)
    ended = engine_pb2.FINISH_REASON_STOP if stop else engine_pb2.FINISH_REASON_LENGTH
    assert last.finish_reason == ended
    assert (service.scheduler.pool.used, service.scheduler.running) == (0, [])


async def test_the_stop_token_is_named(service):
    """An end token that ended an answer is told from a stop text and from the length."""
    (_, last) = (await service.answer(**tokens(248, max_tokens=9)))[-2:]
    assert (last.WhichOneof("stop"), last.stop_token_id) == ("stop_token_id", EOS)
    last = (await service.answer(**tokens(1)))[-1]
    assert last.WhichOneof("stop") is None


async def test_fewest_tokens(service):
    """Before the fewest tokens no stop token comes; then it may."""
    chunks = await service.answer(**tokens(EOS - 1, max_tokens=9, min_tokens=2))
    assert list(chunks[0].token_ids) != [EOS]
    assert len(chunks) == 9


async def test_several_answers(service):
    """Each answer has its messages, its end and its counts; the prompt is computed once."""
    service.scheduler.limits = dataclasses.replace(service.scheduler.limits, max_waiting=3)
    chunks = await service.answer(**tokens(*range(9), n=3, seed=7, temperature=1))
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [list(chunk.token_ids) for chunk in own] == [[9], [10], [11]]
        assert (own[-1].usage.prompt_tokens, own[-1].usage.completion_tokens) == (9, 3)
        assert own[-1].usage.cached_tokens == (8 if index else 0)
        assert all(not chunk.finish_reason for chunk in own[:-1])
    rows = [row for step in service.ranks.steps for row in step]
    assert {row.sampling.seed for row in rows} == {7, 8, 9}
    assert sum(len(row.tokens) for row in rows if row.position == 0) == 9


async def test_a_prefix_is_computed_once(service):
    """A prompt that was seen is found in the cache, and the status says how much is there."""
    first = (await service.answer(**tokens(*range(10))))[-1]
    second = (await service.answer(**tokens(*range(10))))[-1]
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 8)
    status = await service.client.status()
    assert (status.kv_blocks_used, status.kv_blocks_cached) == (0, 3)


async def test_log_probabilities(service):
    """They come with their token, those of the prompt with the first one, and only if asked for."""
    asked = {"logprobs": 1, "prompt_logprobs": 0}
    first, *others = await service.answer(**tokens(5, 6, 7, **asked))
    assert [(p.token.token_id, p.token.logprob) for p in first.prompt_logprobs] == [
        (6, -1),
        (7, -1),
    ]
    assert not any(chunk.prompt_logprobs for chunk in others)
    for chunk in (first, *others):
        (position,) = chunk.logprobs
        assert position.token.token_id == chunk.token_ids[0]
        assert [one.token_id for one in position.top] == [chunk.token_ids[0]]
    assert not any(chunk.logprobs for chunk in await service.answer(**tokens(5, 6, 7)))


@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        ({"choice": {"options": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"regex": "x[0-9]{3}"}, lambda text: text[0] == "x" and len(text) == 4),
        ({"json_schema": '{"enum": [12, 34]}'}, lambda text: json.loads(text) in (12, 34)),
        ({"grammar": 'start: "(" "a"+ ")"'}, lambda text: text.startswith("(a")),
    ],
)
async def test_structure(service, structure, fits):
    """The answer keeps to its structure and ends where that ends."""
    sampling = {"structure": structure, "max_tokens": 30, "ignore_eos": True}
    text, last = await text_of(service, text="a", sampling=sampling)
    assert fits(text), text
    assert last.finish_reason in (engine_pb2.FINISH_REASON_STOP, engine_pb2.FINISH_REASON_LENGTH)


async def test_what_is_looked_back_on(service):
    """Only a choice that depends on the tokens so far is told of them."""
    await service.answer(**tokens(5, 6, presence_penalty=0.5))
    await service.answer(**tokens(5, 6, logit_bias={9: 2.5}))
    with_penalty, with_bias = service.ranks.steps[2][0], service.ranks.steps[5][0]
    assert (with_penalty.prompt, with_penalty.output) == ((5, 6), (7, 8))
    assert (with_bias.prompt, with_bias.sampling.logit_bias) == ((), {9: 2.5})


async def test_aborting_by_name(service):
    """An abort ends all answers of its request with what they have, running or waiting."""
    service.ranks.gate.clear()
    reading = asyncio.create_task(service.answer(request="one", **tokens(1, n=2)))
    await service.ranks.stepping.wait()
    assert await service.client.abort(["one", "nobody", ""]) == 2
    service.ranks.gate.set()
    ends = [chunk for chunk in await reading if chunk.finish_reason]
    assert [chunk.finish_reason for chunk in ends] == [engine_pb2.FINISH_REASON_ABORT] * 2
    assert await service.client.abort(["one"]) == 0
    assert service.scheduler.pool.used == 0
    assert len(await service.answer(request="one", **tokens(1))) == 3


async def test_a_name_that_is_taken(service):
    """Two requests of one name are not served at once; the first is not disturbed."""
    service.ranks.gate.clear()
    reading = asyncio.create_task(service.answer(request="one", **tokens(1)))
    await service.ranks.stepping.wait()
    with pytest.raises(CallFailed) as refused:
        await service.answer(request="one", **tokens(2))
    assert refused.value.code == "ALREADY_EXISTS"
    service.ranks.gate.set()
    assert [list(chunk.token_ids) for chunk in await reading] == [[2], [3], [4]]
    again = await service.answer(request="one", **tokens(2))
    assert [list(chunk.token_ids) for chunk in again] == [[3], [4], [5]]


async def test_a_prompt_that_takes_long_to_read(service, monkeypatch):
    """While a prompt is tokenized others are served."""
    begun, go_on = threading.Event(), threading.Event()
    encode = service.instance.codec.encode

    def slowly(text):
        begun.set()
        assert go_on.wait(30)
        return encode(text)

    monkeypatch.setattr(service.instance.codec, "encode", slowly)
    reading = asyncio.create_task(service.answer(text="a", sampling={"max_tokens": 1}))
    await eventually(begun.is_set)
    assert len(await service.answer(**tokens(1))) == 3
    go_on.set()
    assert len(await reading) == 1


async def test_leaving_at_any_point_leaks_nothing(service):
    """However often and whenever callers leave or abort, every block comes back."""
    chance = random.Random(5)  # noqa: S311 (moments, not secrets)
    for number in range(2000):
        asked = tokens(*range(chance.randint(1, 40)), max_tokens=20, n=chance.randint(1, 2))
        stream = service.client.generate(engine_pb2.GenerateRequest(request=str(number), **asked))
        reading = asyncio.ensure_future(_read(stream, chance.randint(0, 12)))
        for _ in range(chance.randint(0, 6)):
            await asyncio.sleep(0)
        if number % 3 == 0:
            reading.cancel()
        elif number % 3 == 1:
            await service.client.abort([str(number)])
        await asyncio.wait([reading])
    scheduler = service.scheduler
    await eventually(lambda: not scheduler.running and not scheduler.waiting)
    assert scheduler.pool.used == 0
    assert len(await service.answer(**tokens(*range(CONTEXT - 1)))) == 1


async def _read(stream, count: int) -> None:
    """Reads so many messages of a stream at most, and leaves it."""
    async with contextlib.aclosing(stream):
        for _ in range(count):
            if await anext(stream, None) is None:
                return


async def test_a_caller_chooses_how_many_tokens_a_message_has(service):
    """Fewer messages say the same, each token with its log-probability."""
    asked = tokens(5, 6, 7, max_tokens=9, logprobs=0, seed=1)
    each = await service.answer(**asked)
    joined = await service.answer(**asked, stream_interval=4)
    assert [len(message.token_ids) for message in joined] == [1, 4, 4]
    for name in ("token_ids", "logprobs"):
        assert [x for m in joined for x in getattr(m, name)] == [
            x for m in each for x in getattr(m, name)
        ]
    assert "".join(m.text for m in joined) == "".join(m.text for m in each)
    assert joined[-1].usage == each[-1].usage
    assert joined[-1].version_spans == each[-1].version_spans


async def test_a_negative_stream_interval_is_refused(service):
    """Before anything is expected of the request: its name stays free."""
    with pytest.raises(CallFailed) as caught:
        await service.answer(**tokens(5), request="mine", stream_interval=-1)
    assert caught.value.details["field"] == "stream_interval"
    assert await service.client.abort(["mine"]) == 0
