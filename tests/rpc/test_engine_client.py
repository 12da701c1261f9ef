"""The engine's client: what it tries again, what it never does, and how its calls end."""

import asyncio
import socket

import pytest
from engines import Service, tokens
from fakes import eventually

from clients.engine import EngineClient
from clients.errors import CallFailed, DeadlineExceeded, Unreachable
from engine_service.errors import NonFiniteLogits, NotReady
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2

PATIENCE = 20.0


def asked(*, name: str = "", **sampling) -> engine_pb2.GenerateRequest:
    """Returns a request."""
    return engine_pb2.GenerateRequest(request=name, **tokens(1, **sampling))


async def read(client: EngineClient, request=None, **how) -> list[int]:
    """Returns the tokens of an answer."""
    answer = client.generate(request or asked(), **how)
    return [token async for message in answer for token in message.token_ids]


@pytest.fixture
def counted(service, monkeypatch) -> list[str]:
    """States in which the engine was asked, in order."""
    seen = []
    ready_codec = service.instance.ready_codec

    def count():
        seen.append(str(service.instance.lifecycle.state))
        return ready_codec()

    monkeypatch.setattr(service.instance, "ready_codec", count)
    return seen


async def test_waiting_for_an_engine(service, counted):
    """A patient client asks again until the engine is ready."""
    service.enter(State.LANDING)
    reading = asyncio.create_task(read(service.client, patience=PATIENCE))
    await eventually(lambda: counted)
    service.enter(State.READY)
    assert await reading == [2, 3, 4]
    assert counted[0] == "LANDING"


async def test_no_patience(service, counted):
    """Without patience an engine is asked once."""
    service.enter(State.LANDING)
    with pytest.raises(CallFailed) as refused:
        await read(service.client)
    assert (refused.value.code, refused.value.retry_seconds) == ("UNAVAILABLE", 1.0)
    assert counted == ["LANDING"]


async def test_waiting_for_a_process():
    """A patient client waits for an engine that nobody has started yet."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    service = Service()
    async with EngineClient(address) as client:
        with pytest.raises(Unreachable):
            await read(client)
        reading = asyncio.create_task(read(client, patience=PATIENCE))
        await service.start(address)
        try:
            assert await reading == [2, 3, 4]
        finally:
            await service.stop()


async def test_never_after_a_token(service, counted):
    """What ends an answer that has begun is an error, however patient the client is."""
    gate = service.ranks.gate
    gate.clear()
    answer = service.client.generate(asked(max_tokens=9), patience=PATIENCE)
    first = asyncio.ensure_future(anext(answer))
    await service.ranks.stepping.wait()
    gate.set()
    gate.clear()  # one step, and no other
    assert list((await first).token_ids) == [2]
    service.ranks.error = NotReady("gone")
    gate.set()
    with pytest.raises(CallFailed, match="gone") as failed:
        [message async for message in answer]
    assert (failed.value.code, failed.value.retry_seconds) == ("UNAVAILABLE", 1.0)
    assert counted == ["READY", "READY"]


@pytest.mark.parametrize("sampling", [{"top_p": 2.0}, {}])
async def test_other_errors_are_final(service, counted, sampling):
    """A request that is refused, or a step that fails, is not tried again."""
    service.ranks.error = NonFiniteLogits("NaN")
    with pytest.raises(CallFailed):
        await read(service.client, asked(**sampling), patience=PATIENCE)
    assert len(counted) == (1 if sampling else 2)


async def test_the_deadline_holds_for_all_tries(service, counted):
    """Nobody waits for a time beyond the deadline, and an answer ends at it."""
    service.enter(State.LANDING)
    with pytest.raises(CallFailed, match="one is LANDING"):
        await read(service.client, timeout=0.5, patience=PATIENCE)
    assert counted == ["LANDING"]
    service.enter(State.READY)
    service.ranks.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await read(service.client, timeout=0.2, patience=PATIENCE)
    await eventually(lambda: not service.scheduler.running)
    service.ranks.gate.set()


async def test_abort(service):
    """Aborting by name ends every answer of a request with what it has, and nobody else's."""
    service.ranks.gate.clear()
    scheduler = service.scheduler
    one = asyncio.create_task(_last(service.client, asked(name="one", n=2)))
    await eventually(lambda: scheduler.running)  # The queue has no place for all three.
    other = asyncio.create_task(_last(service.client, asked(name="other")))
    await eventually(lambda: len(scheduler.running) + len(scheduler.waiting) == 3)
    assert await service.client.abort(["one", "nobody"]) == 2
    assert await one == engine_pb2.FINISH_REASON_ABORT
    service.ranks.gate.set()
    assert await other == engine_pb2.FINISH_REASON_LENGTH


async def _last(client: EngineClient, request) -> int:
    *_, last = [message async for message in client.generate(request)]
    return last.finish_reason
