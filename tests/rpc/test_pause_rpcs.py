"""Pausing over real sockets: modes, refusals, what waits and who is told."""

import asyncio
import itertools

import grpc
import pytest
from engines import tokens
from fakes import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from clients.engine import EngineClient
from clients.errors import CallFailed, DeadlineExceeded
from engine_service import app
from engine_service.core.pause_modes import PauseMode, PauseRequest
from relay_service.core.instance import State, Weights
from seedrelay.v1 import engine_pb2, engine_pb2_grpc, weights_pb2

SERVICE = "seedrelay.v1.EngineService"
ABORT, LENGTH = engine_pb2.FINISH_REASON_ABORT, engine_pb2.FINISH_REASON_LENGTH
MODES = {mode: getattr(engine_pb2, f"PAUSE_MODE_{mode.name}") for mode in PauseMode}


def asks(mode: PauseMode = PauseMode.KEEP, **how) -> engine_pb2.PauseGenerationRequest:
    """Returns a request to pause; times in seconds."""
    request = engine_pb2.PauseGenerationRequest(mode=MODES[mode])
    for name, value in how.items():
        if isinstance(value, float):
            getattr(request, name).FromNanoseconds(int(value * 1e9))
        else:
            setattr(request, name, value)
    return request


async def pausing(service, *request) -> asyncio.Task:
    """Sends a pause; returns when it has closed the gate."""
    call = asyncio.create_task(service.client.pause(asks(*request)))
    await eventually(lambda: service.instance.engine.gate.closed_by or call.done())
    return call


@pytest.fixture
async def running(service):
    """A stream of 40 tokens whose first step is in work."""
    service.ranks.gate.clear()
    stream = asyncio.create_task(service.answer(request="r", **tokens(1, max_tokens=40)))
    await service.ranks.stepping.wait()
    return stream


@pytest.mark.parametrize(
    ("mode", "counts", "made", "end"),
    [
        (PauseMode.ABORT, {"aborted": 1}, 1, ABORT),
        (PauseMode.WAIT, {"finished": 1}, 40, LENGTH),
        (PauseMode.KEEP, {"paused": 1}, 1, LENGTH),
        (PauseMode.RETRACT, {"retracted": 1, "waiting": 1}, 1, LENGTH),
    ],
)
async def test_each_mode(service, running, mode, counts, made, end):
    """The answer says what became of the stream; no token flows until it is continued."""
    call = await pausing(service, mode)
    service.ranks.gate.set()
    done = await call
    assert {f.name: value for f, value in done.requests.ListFields()} == counts
    assert done.state == weights_pb2.INSTANCE_STATE_PAUSED
    assert (service.scheduler.pool.used > 0) is (mode is PauseMode.KEEP)
    assert service.scheduler.generated_tokens == made
    again = await service.client.resume()
    assert again.was_paused
    assert again.requests.paused == (mode is PauseMode.KEEP)
    chunks = await running
    assert chunks[-1].finish_reason == end
    found = [token for chunk in chunks for token in chunk.token_ids]
    assert found == list(range(2, 2 + (40 if end == LENGTH else 1)))
    assert service.scheduler.pool.used == 0


async def test_unset_keeps(service, running):
    """A pause that names no mode keeps what runs."""
    call = asyncio.create_task(service.client.pause(engine_pb2.PauseGenerationRequest()))
    await eventually(lambda: service.instance.engine.gate.closed_by)
    service.ranks.gate.set()
    assert (await call).requests.paused == 1
    await service.client.resume()
    assert len(await running) == 40


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (engine_pb2.PauseGenerationRequest(mode=99), "mode"),
        (asks(on_deadline=MODES[PauseMode.WAIT]), "on_deadline"),
        (engine_pb2.PauseGenerationRequest(on_deadline=7), "on_deadline"),
        (asks(deadline=-1.0), "deadline"),
        (asks(drain_delay=-1.0), "drain_delay"),
    ],
)
async def test_refusals(service, request_, field):
    """What cannot be meant is refused by field, and nothing is paused."""
    with pytest.raises(CallFailed) as refused:
        await service.client.pause(request_)
    assert (refused.value.code, refused.value.details["field"]) == ("INVALID_ARGUMENT", field)
    assert service.instance.lifecycle.state is State.READY


async def test_not_ready(service):
    """A dummy can be neither paused nor continued."""
    service.enter(State.DUMMY)
    for call in (service.client.pause(asks()), service.client.resume()):
        with pytest.raises(CallFailed, match="is DUMMY") as refused:
            await call
        assert refused.value.code == "UNAVAILABLE"


async def test_requests_that_come_while_it_is_paused(service):
    """They are visible, bounded, end at their deadline or by name, and are served afterwards."""
    await service.client.pause(asks(operator="ops"))
    late = asyncio.create_task(service.answer(request="late", **tokens(1)))

    async def wait(count: int) -> bool:
        return (await service.client.status()).waiting_at_gate == count

    await eventually(lambda: wait(1))
    stub = engine_pb2_grpc.EngineServiceStub(service.client.channel)
    hasty = stub.Generate(engine_pb2.GenerateRequest(**tokens(2)), timeout=0.3)
    assert await hasty.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: wait(1))  # the server has seen it too
    named = asyncio.create_task(service.answer(request="n", **tokens(3, n=2)))
    await eventually(lambda: wait(2))
    with pytest.raises(CallFailed) as refused:
        await service.answer(**tokens(4))
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    assert refused.value.retry_seconds
    status = await service.client.status()
    assert (status.pause.operator, status.pause.mode) == ("ops", MODES[PauseMode.KEEP])
    assert status.pause.age_seconds > 0
    assert await service.client.abort(["n"]) == 1
    ends = await named
    assert [(end.index, end.finish_reason) for end in ends] == [(0, ABORT), (1, ABORT)]
    assert service.ranks.steps == []
    await service.client.resume()
    assert [chunk.weight_version for chunk in await late] == ["v1"] * 3
    assert not (await service.client.status()).HasField("pause")


async def test_who_pauses(service):
    """A caller that gives no name is called by its address, and the first one counts."""
    await service.client.pause(asks())
    await service.client.pause(asks(operator="second"))
    status = await service.client.status()
    assert status.pause.operator.startswith("ipv4:127.0.0.1:")
    assert status.state == weights_pb2.INSTANCE_STATE_PAUSED
    gateway = vllm_engine_pb2_grpc.VllmEngineStub(service.client.channel)
    assert (await gateway.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())).is_paused


@pytest.mark.parametrize("own", [True, False])
async def test_deadlines(service, running, own):
    """Over the call's own deadline or the one that it states, the instance is as it was."""
    request = asks(PauseMode.WAIT, **({} if own else {"deadline": 0.2}))
    with pytest.raises(DeadlineExceeded) as late:
        await service.client.pause(request, timeout=0.2 if own else None)
    assert own or late.value.reason == "WaitTimeout"
    await eventually(lambda: service.instance.lifecycle.state is State.READY)
    service.ranks.gate.set()
    assert len(await running) == 40


async def test_health(service, running):
    """Readiness goes before the gate closes and comes back; liveness stays."""
    stub = health_pb2_grpc.HealthStub(service.client.channel)

    async def says(*, serving: bool) -> bool:
        names = ["", SERVICE, "vllm.grpc.engine.VllmEngine"]
        found = [await stub.Check(health_pb2.HealthCheckRequest(service=one)) for one in names]
        expected = health_pb2.HealthCheckResponse.SERVING
        assert found[0].status == expected
        return [one.status == expected for one in found[1:]] == [serving] * 2

    await eventually(lambda: says(serving=True))
    call = asyncio.create_task(service.client.pause(asks(drain_delay=600.0)))
    await eventually(lambda: says(serving=False))
    assert service.instance.engine.gate.closed_by is None
    call.cancel()
    await eventually(lambda: says(serving=True))
    call = await pausing(service)
    service.ranks.gate.set()
    await call
    await eventually(lambda: says(serving=False))
    await service.client.resume()
    await eventually(lambda: says(serving=True))
    await running


async def test_flush_and_abort_all_under_load(service):
    """Again and again, whatever runs: every stream gets its end, and the cache is empty."""
    for round_ in range(20):
        asked = [tokens(*range(1, 10), max_tokens=40) for _ in range(4)]
        streams = [asyncio.create_task(service.answer(**one)) for one in asked]
        if round_ % 2:
            await eventually(lambda: service.scheduler.generated_tokens % 7)
        if round_ % 4 < 2:
            done = await service.client.pause(asks(PauseMode.ABORT))
            assert done.requests.aborted <= 4
        flushed = await service.client.flush()
        assert flushed.blocks_in_use == 0 or round_ % 4 >= 2
        assert await service.client.abort_all() <= 4
        await service.client.resume()
        for stream in asyncio.as_completed(streams):
            try:
                assert (await stream)[-1].finish_reason in (ABORT, LENGTH)
            except CallFailed as error:
                assert error.code == "RESOURCE_EXHAUSTED"  # noqa: PT017 - two may wait
        assert service.scheduler.pool.used == 0


async def test_flushing(service):
    """It frees what only the cache holds, and says how much requests hold."""
    await service.answer(**tokens(*range(1, 13)))
    assert service.scheduler.pool.cached == 3
    done = await service.client.flush()
    assert (done.flushed_blocks, done.blocks_in_use) == (3, 0)
    assert (await service.client.flush()).flushed_blocks == 0


async def update(service, mode: PauseMode) -> None:
    """Switches to the next version, as a commit does."""
    weights = service.instance.engine.weights
    async with service.instance.pauser.applying(PauseRequest(mode)):
        epoch = weights.epoch + 1
        service.instance.engine.switch(Weights(f"v{epoch}", f"d{epoch}", epoch))


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT])
@pytest.mark.parametrize("one_version", [True, False])
async def test_versions(service, mode, one_version):
    """Chunks and spans say which weights made them; one that wants one version is not mixed."""
    service.ranks.gate.clear()
    asked = {"one_version": one_version, **tokens(1, max_tokens=40)}
    stream = asyncio.create_task(service.answer(**asked))
    await service.ranks.stepping.wait()
    updating = asyncio.create_task(update(service, mode))
    await eventually(lambda: service.instance.engine.gate.closed_by)
    service.ranks.gate.set()
    await updating
    chunks = await stream
    spans = [(s.weight_version, s.start, s.end) for s in chunks[-1].version_spans]
    if one_version:
        assert (spans, chunks[-1].finish_reason) == ([("v1", 0, 1)], ABORT)
    else:
        assert (spans, chunks[-1].finish_reason) == ([("v1", 0, 1), ("v2", 1, 40)], LENGTH)
        assert [c.weight_version for c in chunks] == ["v1"] + ["v2"] * 39


async def test_a_demanded_version(service):
    """Another one than serves is refused, also when it changed while the request waited."""
    demanded = {"weight_version": "v1", **tokens(1)}
    assert (await service.answer(**demanded))[-1].weight_version == "v1"
    await service.client.pause(asks())
    waiting = asyncio.create_task(service.answer(**demanded))
    await eventually(lambda: service.instance.engine.gate.waiting)
    await update(service, PauseMode.KEEP)
    await service.client.resume()
    with pytest.raises(CallFailed) as refused:
        await waiting
    assert refused.value.code == "FAILED_PRECONDITION"
    assert refused.value.details["found"] == "v2"


async def test_memory_is_given_back_after_an_update(service):
    """The first continue after one reports what devices had reserved, before and after."""
    service.ranks.reserved = (100, 60)
    await service.client.pause(asks())
    await update(service, PauseMode.KEEP)
    done = await service.client.resume()
    assert (done.reserved_bytes_before, done.reserved_bytes_after) == (100, 60)


class Link:
    """A relay that hears how the instance changes."""

    address = "127.0.0.1:1"

    def __init__(self, instance) -> None:
        self._instance = instance
        self.told = []

    async def update(self) -> None:
        """Reads the state, as an attachment does."""
        self.told.append(self._instance.lifecycle.state)


async def test_the_relay_hears_of_pauses(service):
    """It is told of a pause and of its end, not of the moment in which weights are applied."""
    service.instance.link = link = Link(service.instance)
    telling = asyncio.create_task(app._tell_of_pauses(service.instance))
    await service.client.pause(asks())
    await eventually(lambda: link.told == [State.PAUSED])
    await update(service, PauseMode.KEEP)
    await eventually(lambda: link.told[1:] == [State.PAUSED])
    await service.client.resume()
    await eventually(lambda: link.told[-1] is State.READY)
    await update(service, PauseMode.KEEP)
    await eventually(lambda: link.told[-1] is State.READY)
    assert State.UPDATING not in link.told
    telling.cancel()
    await asyncio.wait([telling])


async def test_races(service):
    """Pauses, updates and continues of three clients: no call hangs, and every stream is whole."""
    modes = itertools.cycle([PauseMode.WAIT, PauseMode.KEEP, PauseMode.RETRACT])

    async def ask(first: int) -> None:
        for _ in range(12):
            chunks = await service.answer(**tokens(first, max_tokens=50))
            made = [token for chunk in chunks for token in chunk.token_ids]
            assert made == list(range(first + 1, first + 51))

    async def change(client: EngineClient) -> None:
        await update(service, PauseMode.RETRACT)
        await client.status()

    async def often(call) -> int:
        times = 0
        async with EngineClient(service.address) as client:
            while not asking.done():
                try:
                    await call(client)
                    times += 1
                except CallFailed as error:
                    assert error.code == "FAILED_PRECONDITION"  # noqa: PT017
        return times

    async with asyncio.timeout(60):
        asking = asyncio.gather(ask(1), ask(2))
        times = await asyncio.gather(
            often(lambda client: client.pause(asks(next(modes)), timeout=10)),
            often(change),
            often(lambda client: client.resume()),
            asking,
        )
    assert min(times[:3]) > 10
    assert service.instance.engine.weights.epoch == 1 + times[1]
    await service.client.resume()
    assert service.instance.lifecycle.state is State.READY


@pytest.mark.full
async def test_a_long_silence(service, running):
    """A client that pings while a kept stream is silent is not sent away."""
    call = await pausing(service)
    service.ranks.gate.set()
    await call
    options = (("grpc.keepalive_time_ms", 500), ("grpc.keepalive_permit_without_calls", 1))
    async with grpc.aio.insecure_channel(service.address, options=options) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        stream = stub.Generate(engine_pb2.GenerateRequest(**tokens(9)))
        reading = asyncio.ensure_future(stream.read())
        done, _ = await asyncio.wait([reading], timeout=8)
        assert not done
        await service.client.resume()
        assert (await reading).token_ids == [10]
    assert len(await running) == 40
