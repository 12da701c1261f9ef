"""The engine service over real sockets, with a runner that adds one instead of a model."""

import asyncio
import contextlib
from types import SimpleNamespace

import grpc
import pytest
from engines import CONTEXT, tokens
from fakes import eventually
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

import clients.engine
from clients.channel import MESSAGE_BYTES
from clients.errors import CallFailed, DeadlineExceeded
from engine_service.core.fill import Filler
from engine_service.core.scheduler import Limits
from engine_service.errors import NonFiniteLogits
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2, engine_pb2_grpc, weights_pb2

SERVICE = "seedrelay.v1.EngineService"
SERVING = (State.READY, State.PAUSED, State.UPDATING)
NOT_READY = [state for state in State if state not in SERVING]


async def test_an_answer(service):
    """Chunks carry tokens, text and version; the last one the reason, counts and spans too."""
    chunks = await service.answer(text="a", sampling={"max_tokens": 3})
    assert [list(chunk.token_ids) for chunk in chunks] == [[98], [99], [100]]
    assert "".join(chunk.text for chunk in chunks) == "bcd"
    assert {(chunk.weight_version, chunk.epoch) for chunk in chunks} == {("v1", 1)}
    *first, last = chunks
    assert all(c.finish_reason == engine_pb2.FINISH_REASON_UNSPECIFIED for c in first)
    assert last.finish_reason == engine_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, 3)
    assert [(s.weight_version, s.start, s.end) for s in last.version_spans] == [("v1", 0, 3)]


# Ready or not


@pytest.mark.parametrize("state", NOT_READY)
async def test_not_ready(service, state):
    """Nothing is generated where nothing serves; the refusal says when to try again."""
    service.enter(state, "because")
    stub = engine_pb2_grpc.EngineServiceStub(service.client.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.Generate(engine_pb2.GenerateRequest(**tokens(1))):
            pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"one is {state}: because" in refused.value.details()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    packed = rpc_status.from_call(refused.value).details
    assert packed[0].Unpack(info)
    assert packed[1].Unpack(retry)
    assert (info.reason, info.metadata["found"]) == ("NotReady", str(state))
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert service.ranks.steps == []


async def test_health_follows_the_state(service):
    """The process is alive in every state, and serving by its name in READY alone."""
    stub = health_pb2_grpc.HealthStub(service.client.channel)

    async def serving(name: str) -> bool:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    await eventually(lambda: serving(SERVICE))
    for state in (State.PAUSED, State.READY, State.UPDATING, State.READY, State.DRAINING):
        service.instance.lifecycle.to(state)

        async def follows(ready=state is State.READY) -> bool:
            return await serving(SERVICE) == ready

        await eventually(follows)
        assert await serving("")


async def test_watching_the_status(service):
    """A watcher gets the state at once and at every change, and the stream ends with it."""
    watching = service.client.watch()
    first = await anext(watching)
    assert (first.state, first.instance, first.weight_version) == (5, "one", "v1")
    seen = []
    for state in (State.PAUSED, State.READY, State.FAILED, State.STOPPED):
        service.instance.lifecycle.to(state, "why")
        seen.append(await anext(watching))
    assert [status.state for status in seen] == [6, 5, 10, 9]
    assert seen[2].reason == "why"
    assert [status async for status in watching] == []


async def test_the_status(service):
    """The status shows identity, weights, load and limits as they are."""
    service.ranks.gate.clear()
    reading = asyncio.create_task(service.answer(**tokens(1, 2, 3)))
    await service.ranks.stepping.wait()
    status = await service.client.status()
    assert (status.generation, status.model, status.epoch) == ("life", "tiny", 1)
    assert (status.running, status.waiting) == (1, 0)
    assert (status.kv_blocks_used, status.kv_blocks_total) == (1, 32)
    assert (status.limits.max_context_tokens, status.limits.max_waiting) == (CONTEXT, 2)
    service.ranks.gate.set()
    await reading
    assert (await service.client.status()).running == 0


async def test_the_status_says_how_far_it_is(service):
    """Loading is what the ranks have read together; a ready instance has no progress."""
    assert not (await service.client.status()).HasField("progress")
    service.instance.lifecycle.state = State.LOADING
    service.ranks.workers = [SimpleNamespace(progress=(3, 10)), SimpleNamespace(progress=(4, 11))]
    progress = (await service.client.status()).progress
    assert (progress.phase, progress.bytes_verified, progress.bytes_total) == ("loading", 7, 21)


# Leaving and failing


async def test_leaving_frees_the_kv(service):
    """A client that cancels frees its KV and slot, while a step runs and between two."""
    for within_step in (True, False):
        asked = engine_pb2.GenerateRequest(**tokens(1, max_tokens=100, ignore_eos=True))
        answer = service.client.generate(asked)
        await anext(answer)
        if within_step:
            service.ranks.gate.clear()
        await answer.aclose()
        await eventually(lambda: not service.scheduler.running)
        assert service.scheduler.pool.used == 0
        service.ranks.gate.set()
    assert len(await service.answer(**tokens(1))) == 3


async def test_a_full_queue(service):
    """When too many wait, more are refused with a time to try again; those who wait are served."""
    service.ranks.gate.clear()
    service.scheduler.limits = Limits(CONTEXT, 1, 2, 4)
    waiting = [asyncio.create_task(service.answer(**tokens(1)))]
    await service.ranks.stepping.wait()
    waiting += [asyncio.create_task(service.answer(**tokens(1))) for _ in range(2)]
    await eventually(lambda: len(service.scheduler.waiting) == 2)
    with pytest.raises(CallFailed) as refused:
        await service.answer(**tokens(1))
    assert (refused.value.code, refused.value.reason) == ("RESOURCE_EXHAUSTED", "QueueFull")
    service.ranks.gate.set()
    assert [len(chunks) for chunks in await asyncio.gather(*waiting)] == [3, 3, 3]


async def test_a_step_that_fails(service):
    """A failed step is an error of its requests, and the service goes on."""
    service.ranks.error = NonFiniteLogits("the weights compute NaN")
    with pytest.raises(CallFailed, match="compute NaN") as failed:
        await service.answer(**tokens(1))
    assert (failed.value.code, failed.value.reason) == ("INTERNAL", "NonFiniteLogits")
    assert len(await service.answer(**tokens(1))) == 3


async def test_the_edge_of_the_message_limit(service):
    """A message of just the limit is read, one byte more is refused with it, the next is served."""
    method = engine_pb2_grpc.EngineServiceStub(service.client.channel).Abort
    name = "x" * (MESSAGE_BYTES - 5)  # after a tag of one byte and a length of four
    largest = engine_pb2.AbortRequest(requests=[name])
    assert largest.ByteSize() == MESSAGE_BYTES
    assert (await method(largest)).aborted == 0
    with pytest.raises(grpc.aio.AioRpcError, match=str(MESSAGE_BYTES)) as refused:
        await method(engine_pb2.AbortRequest(requests=[name + "x"]))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await method(largest)).aborted == 0


async def test_draining_ends_with_what_there_is(service):
    """An answer that is ended early says `abort`, and counts what was made."""
    service.ranks.gate.clear()
    reading = asyncio.create_task(service.answer(**tokens(1)))
    await service.ranks.stepping.wait()
    service.scheduler.abort_all(service.instance.engine.weights)
    (last,) = await reading
    assert last.finish_reason == engine_pb2.FINISH_REASON_ABORT
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, 0)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (engine_pb2.PullWeightsRequest(), "INVALID_ARGUMENT"),
        (
            engine_pb2.PullWeightsRequest(relay="a:1", options={"rate_limit_bytes_per_second": -1}),
            "INVALID_ARGUMENT",
        ),
        (engine_pb2.PullWeightsRequest(relay="a:1"), "FAILED_PRECONDITION"),
    ],
)
async def test_pulls_that_are_refused(service, request_, code):
    """A serving instance is not filled, and a pull needs a relay and sensible options."""
    with pytest.raises(CallFailed) as refused:
        async for _ in service.client.pull(request_.relay, request_.options):
            pass
    assert refused.value.code == code
    assert service.instance.lifecycle.state is State.READY


async def test_reflection(service):
    """Tools find the service without our protos."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(service.client.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    with contextlib.suppress(asyncio.CancelledError):
        call.cancel()
    names = {found.name for found in answer.list_services_response.service}
    assert {SERVICE, "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} <= names


async def test_an_engine_that_hangs_during_a_pull(service, monkeypatch):
    """Whoever pulls with a deadline is told soon after it, also by an engine that says nothing."""

    async def hang(*_) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Filler, "fill", hang)
    monkeypatch.setattr(clients.engine, "OVERTIME_SECONDS", 0.1)
    options = weights_pb2.PullOptions(timeout={"nanos": 100_000_000})
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineExceeded):
            async for _ in service.client.pull("127.0.0.1:1", options):
                pass
