"""Answers that are made while experts are lost say so, and whoever refuses them gets none."""

import asyncio
import json

import pytest
from engines import tokens
from fakes import eventually
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from typer.testing import CliRunner

from clients.cli import app
from clients.errors import CallFailed
from seedrelay.v1 import engine_pb2

PROMPT = tuple(range(20))


async def degrade(service, *, degraded: bool = True) -> None:
    """Ends the step in work, if there is one, and lets no other begin before the change."""
    engine, gate = service.instance.engine, service.ranks.gate
    held = not gate.is_set()
    engine.freeze()
    gate.set()
    async with engine.between_steps():
        engine.set_degraded(degraded)
    if held:
        gate.clear()
    engine.thaw()


async def marked(service, **request) -> list[engine_pb2.GenerateResponse]:
    """Returns an answer of four tokens, of which the second is made while experts are lost."""
    steps = service.ranks.steps
    steps.clear()
    service.ranks.gate.clear()
    reading = asyncio.create_task(service.answer(**tokens(1, max_tokens=4), **request))
    await eventually(lambda: len(steps) == 1)
    await degrade(service)
    await eventually(lambda: len(steps) == 2)
    await degrade(service, degraded=False)
    await eventually(lambda: len(steps) == 3)
    service.ranks.gate.set()
    return await reading


async def test_each_token_says_how_it_was_made(service):
    """Nothing else differs; the last message speaks of the whole answer."""
    found = await marked(service)
    assert [list(one.token_ids) for one in found] == [[2], [3], [4], [5]]
    assert [one.degraded for one in found] == [False, True, False, True]
    assert found[-1].finish_reason == engine_pb2.FINISH_REASON_LENGTH
    read = [rows[0].tokens for rows in service.ranks.steps]
    assert read == [(1,), (1, 2), (1, 2, 3), (4,)], "KV of either side is of no use to the other"
    again = await service.answer(**tokens(1))
    assert not any(one.degraded for one in again)


async def test_messages_of_several_tokens(service):
    """None holds tokens of both kinds."""
    found = await marked(service, stream_interval=9)
    assert [list(one.token_ids) for one in found] == [[2], [3], [4, 5]]
    assert [one.degraded for one in found] == [False, True, True]
    await degrade(service)
    found = await service.answer(**tokens(1, max_tokens=8), stream_interval=3)
    assert [len(one.token_ids) for one in found] == [1, 3, 3, 1]
    assert all(one.degraded for one in found)


async def test_kv_is_never_found_on_the_other_side(service):
    """Neither whole KV while experts are lost, nor theirs after another loss, or ever after."""

    async def cached() -> int:
        *_, last = await service.answer(**tokens(*PROMPT, max_tokens=1))
        return last.usage.cached_tokens

    assert [await cached(), await cached()] == [0, 16]
    await degrade(service)
    assert [await cached(), await cached()] == [0, 16]
    await degrade(service)
    assert [await cached(), await cached()] == [0, 16]
    await degrade(service, degraded=False)
    assert await cached() == 16, "what was whole before is found again"
    assert service.scheduler.pool.used == 0


async def test_whole_stays_whole(service):
    """To say so once more disturbs nobody."""
    service.ranks.gate.clear()
    reading = asyncio.create_task(service.answer(**tokens(1)))
    await service.ranks.stepping.wait()
    await degrade(service, degraded=False)
    service.ranks.gate.set()
    assert len(await reading) == 3
    assert service.scheduler.retracted == 0


async def test_who_refuses(service):
    """Is refused, fails in the midst of an answer, or in the queue; others are served."""
    service.ranks.gate.clear()
    refusing = {"refuse_degraded": True}
    running = [
        asyncio.create_task(service.answer(**tokens(1, n=2), **refusing)),
        asyncio.create_task(service.answer(**tokens(9))),
    ]
    await service.ranks.stepping.wait()
    await eventually(lambda: len(service.scheduler.running) + service.scheduler.queued == 3)
    await degrade(service)
    service.ranks.gate.set()
    failed, served = await asyncio.gather(*running, return_exceptions=True)
    late = await asyncio.gather(service.answer(**tokens(1), **refusing), return_exceptions=True)
    for error in (failed, *late):
        assert isinstance(error, CallFailed)
        assert (error.code, error.reason, error.retry_seconds) == ("UNAVAILABLE", "NotReady", 1.0)
        assert error.details["field"] == "refuse_degraded"
    assert [token for one in served for token in one.token_ids] == [10, 11, 12]
    await degrade(service, degraded=False)
    assert not any(one.degraded for one in await service.answer(**tokens(1), **refusing))
    assert service.scheduler.pool.used == 0


async def test_what_a_gateway_is_told(service):
    """Its protocol has no field: it comes as trailing metadata, where it is so."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(service.client.channel)

    async def trailing(name: str) -> dict:
        call = stub.Generate(
            vllm_engine_pb2.GenerateRequest(
                request_id=name, tokenized={"input_ids": [1]}, sampling_params={"max_tokens": 3}
            )
        )
        assert [response async for response in call]
        return dict(await call.trailing_metadata())

    assert "seedrelay-degraded" not in await trailing("a")
    await degrade(service)
    assert (await trailing("b"))["seedrelay-degraded"] == "true"


async def test_the_command(service):
    """JSON marks chunks, words end with a line on stderr; both can refuse."""

    async def generate(*options: str):
        line = ["generate", "--engine", service.address, "--max-tokens", "2", "A", *options]
        return await asyncio.to_thread(CliRunner().invoke, app, line)

    whole = await generate("--json")
    assert not any("degraded" in json.loads(line) for line in whole.stdout.splitlines())
    assert (await generate("--refuse-degraded")).stderr == ""
    await degrade(service)
    chunks = [json.loads(line) for line in (await generate("--json")).stdout.splitlines()]
    assert [one["degraded"] for one in chunks] == [True, True]
    text = await generate()
    assert (text.exit_code, text.stdout) == (0, "BC\n")
    assert text.stderr == "degraded: experts were lost, others served in their place\n"
    refused = await generate("--refuse-degraded")
    assert refused.exit_code == 1
    assert "refuses answers without them" in refused.stderr
    assert "hint: ask another instance" in refused.stderr


@pytest.mark.parametrize("interval", [0, 9])
async def test_an_answer_that_is_ended(service, interval):
    """Its end says what its tokens were, though it brings none."""
    await degrade(service)
    service.ranks.gate.clear()
    request = tokens(1, max_tokens=30) | {"request": "one", "stream_interval": interval}
    reading = asyncio.create_task(service.answer(**request))
    await eventually(lambda: len(service.ranks.steps) == 1)
    service.ranks.gate.set()
    service.ranks.gate.clear()
    await eventually(lambda: len(service.ranks.steps) == 2)
    assert await service.client.abort(["one"]) == 1
    found = await reading
    service.ranks.gate.set()
    assert [(list(one.token_ids), one.degraded) for one in found] == [([2], True), ([], True)]
