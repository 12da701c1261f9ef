"""Requests that wait for their turn, and callers who don't wait for them."""

import asyncio
import dataclasses
import threading

import grpc
import pytest
from engines import tokens
from fakes import eventually
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from clients.errors import CallFailed
from engine_service.core.blocks import BlockPool
from seedrelay.v1 import engine_pb2, engine_pb2_grpc

LATE_SECONDS = 1.0
"""A deadline that leaves time to reach the queue."""
LEAVER = 77


def own(service, answers: int, timeout: float | None = None) -> grpc.aio.Call:
    """Asks by our protocol."""
    asked = engine_pb2.GenerateRequest(request="leaver", **tokens(LEAVER, n=answers))
    stub = engine_pb2_grpc.EngineServiceStub(service.client.channel)
    return stub.Generate(asked, timeout=timeout)


def gateway(service, answers: int, timeout: float | None = None) -> grpc.aio.Call:
    """Asks by the gateway's protocol."""
    asked = vllm_engine_pb2.GenerateRequest(
        request_id="leaver", tokenized={"input_ids": [LEAVER]}, sampling_params={"n": answers}
    )
    stub = vllm_engine_pb2_grpc.VllmEngineStub(service.client.channel)
    return stub.Generate(asked, timeout=timeout)


@pytest.fixture
async def busy(service):
    """An engine whose only slot is taken by a request that is in its first step."""
    service.scheduler.limits = dataclasses.replace(service.scheduler.limits, max_running=1)
    service.ranks.gate.clear()
    running = asyncio.create_task(service.answer(**tokens(1)))
    await service.ranks.stepping.wait()
    yield service
    service.ranks.gate.set()
    assert len(await running) == 3


async def is_queued(service, answers: int) -> bool:
    """Says whether the status shows so many answers in the queue, and one that runs."""
    status = await service.client.status()
    return (status.running, status.waiting) == (1, answers)


@pytest.mark.parametrize("ask", [own, gateway])
@pytest.mark.parametrize("answers", [1, 2])
@pytest.mark.parametrize("leaves", ["deadline", "cancel"])
async def test_who_leaves_the_queue(busy, ask, answers, leaves):
    """Whoever is late or leaves is out of the queue while others run, and no rank hears of it."""
    call = ask(busy, answers, LATE_SECONDS if leaves == "deadline" else None)
    reading = asyncio.ensure_future(call.read())
    await eventually(lambda: is_queued(busy, answers))
    if leaves == "cancel":
        call.cancel()
    await asyncio.wait([reading])
    expected = {"deadline": "DEADLINE_EXCEEDED", "cancel": "CANCELLED"}[leaves]
    assert (await call.code()).name == expected
    await eventually(lambda: is_queued(busy, 0))
    again = asyncio.create_task(busy.answer(request="leaver", **tokens(2)))
    busy.ranks.gate.set()
    assert len(await again) == 3  # the name and the slot are free
    rows = [row for step in busy.ranks.steps for row in step]
    assert not any(LEAVER in row.tokens for row in rows)
    assert busy.scheduler.pool.used == 0


@pytest.mark.parametrize("leaves", ["deadline", "cancel"])
async def test_who_leaves_before_the_queue(service, monkeypatch, leaves):
    """Whoever is late or leaves while the prompt is still read never gets into the queue."""
    begun, go_on = threading.Event(), threading.Event()
    encode = service.instance.codec.encode

    def slowly(text: str) -> tuple[int, ...]:
        begun.set()
        assert go_on.wait(30)
        return encode(text)

    monkeypatch.setattr(service.instance.codec, "encode", slowly)
    asked = engine_pb2.GenerateRequest(request="leaver", text="M")
    stub = engine_pb2_grpc.EngineServiceStub(service.client.channel)
    call = stub.Generate(asked, timeout=LATE_SECONDS if leaves == "deadline" else None)
    reading = asyncio.ensure_future(call.read())
    await eventually(begun.is_set)
    if leaves == "cancel":
        call.cancel()
    await asyncio.wait([reading])

    async def forgotten() -> bool:
        return await service.client.abort(["leaver"]) == 0

    await eventually(forgotten)
    go_on.set()
    assert len(await service.answer(request="leaver", **tokens(2))) == 3
    assert not any(LEAVER in row.tokens for step in service.ranks.steps for row in step)


async def test_who_leaves_makes_room(busy):
    """The place of one who left a full queue is another's; those who still wait are served."""
    leaver, stayer = own(busy, 1), asyncio.create_task(busy.answer(**tokens(3)))
    leaving = asyncio.ensure_future(leaver.read())
    await eventually(lambda: is_queued(busy, 2))
    with pytest.raises(CallFailed) as refused:
        await busy.answer(**tokens(4))
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    leaver.cancel()
    await asyncio.wait([leaving])
    await eventually(lambda: is_queued(busy, 1))
    another = asyncio.create_task(busy.answer(**tokens(5)))
    await eventually(lambda: is_queued(busy, 2))
    busy.ranks.gate.set()
    assert [len(chunks) for chunks in await asyncio.gather(stayer, another)] == [3, 3]


async def test_aborting_one_that_waits(busy):
    """It ends at once and without a token, while others run and wait; it is never prefilled."""
    busy.scheduler.limits = dataclasses.replace(busy.scheduler.limits, max_waiting=3)
    stayers = [asyncio.create_task(busy.answer(**tokens(n))) for n in (2, 3)]
    await eventually(lambda: is_queued(busy, 2))
    ending = asyncio.create_task(busy.answer(request="leaver", **tokens(LEAVER)))
    await eventually(lambda: is_queued(busy, 3))
    assert await busy.client.abort(["leaver"]) == 1
    (end,) = await ending
    assert (end.finish_reason, list(end.token_ids)) == (engine_pb2.FINISH_REASON_ABORT, [])
    assert await is_queued(busy, 2)
    busy.ranks.gate.set()
    assert [len(chunks) for chunks in await asyncio.gather(*stayers)] == [3, 3]
    assert not any(LEAVER in row.tokens for step in busy.ranks.steps for row in step)


async def test_what_never_fits_blocks_nobody(service):
    """Beside a small KV cache, what can never fit is refused at once; what just fits is served."""
    service.scheduler.pool = BlockPool(4, 4)
    exact = asyncio.create_task(service.answer(**tokens(*range(15), max_tokens=1)))
    smaller = asyncio.create_task(service.answer(**tokens(*range(11), max_tokens=9)))
    for length in (16, 17, 20):
        with pytest.raises(CallFailed, match="may have 16 together") as refused:
            await service.answer(**tokens(*range(length)))
        assert refused.value.code == "INVALID_ARGUMENT"
    assert len(await service.answer(**tokens(1))) == 3
    assert len(await exact) == 1
    assert len(await smaller) == 5  # to the end of the cache
    assert service.scheduler.pool.used == 0


async def test_a_long_text_holds_nobody_up(service):
    """While the real tokenizer reads a megabyte, others are answered, many times over."""
    reading, answered = asyncio.create_task(service.answer(text="x" * (1 << 20))), 0
    while not reading.done():
        assert len(await service.answer(**tokens(1))) == 3
        answered += 1
    with pytest.raises(CallFailed, match="1048576 tokens") as refused:
        await reading
    assert refused.value.code == "INVALID_ARGUMENT"
    assert answered > 5
