"""A real engine that is paused: by command, until it is told to end, and when a rank dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from stage import READY, Stage, answer, eventually, health, reach, request, seedrelay, status_of

from clients.engine import EngineClient
from clients.errors import ClientError
from seedrelay.v1 import engine_pb2

SERVICE = "seedrelay.v1.EngineService"
ABORT = engine_pb2.FINISH_REASON_ABORT
GRACE_SECONDS = 60


async def last_of(client: EngineClient, asked: engine_pb2.GenerateRequest):
    """Returns the last message of an answer."""
    *_, last = [message async for message in client.generate(asked)]
    return last


async def test_by_command(stage: Stage, model: Path) -> None:
    """Commands pause, show, flush, abort and continue; SIGTERM ends what is paused at once."""
    engine = stage.engine(model, "--grace", str(GRACE_SECONDS))
    await reach(engine)
    expected = await answer(engine)
    at = ("--engine", engine.address, "--json")
    long = request(max_tokens=1800)
    async with EngineClient(engine.address) as client:
        stream = client.generate(long)
        await anext(stream)
        await client.pause(engine_pb2.PauseGenerationRequest(operator="ops"))
        paused = await asyncio.to_thread(seedrelay, "pause", *at, "--operator", "second")
        assert (paused.json()["state"], paused.json()["was_paused"]) == ("PAUSED", True)
        assert paused.json()["requests"]["paused"] == 1
        assert await health(engine, SERVICE) == "NOT_SERVING"
        assert await health(engine, "") == "SERVING"
        shown = await asyncio.to_thread(seedrelay, "status", engine.address, "--json")
        assert shown.json()["pause"]["operator"] == "ops"
        assert (shown.json()["pause"]["mode"], shown.json()["waiting_at_gate"]) == ("keep", 0)
        await _explained(engine)
        flushed = await asyncio.to_thread(seedrelay, "flush", *at)
        assert flushed.json()["blocks_in_use"] > 0
        late = await asyncio.to_thread(seedrelay, "generate", *at, "--deadline", "1", "x")
        assert late.status == 4
        aborted = await asyncio.to_thread(seedrelay, "abort", *at, "--all")
        assert aborted.json() == {"aborted": 1}
        assert [message async for message in stream][-1].finish_reason == ABORT
        continued = await asyncio.to_thread(seedrelay, "continue", *at)
        assert continued.json()["was_paused"]
        assert await answer(engine) == expected
        await _ends_at_once(engine, client, long)


async def _explained(engine) -> None:
    """`--debug` says who has paused, what was checked, and what the rank's process takes."""
    checked = await asyncio.to_thread(seedrelay, "check", "--engine", engine.address)
    assert checked.status == 0, checked.err
    shown = await asyncio.to_thread(seedrelay, "status", engine.address, "--debug", "--json")
    status, debug = shown.json(), shown.json()["debug"]
    assert (debug["pause"]["operator"], debug["session"], debug["locks"]) == ("ops", None, [])
    assert debug["last_check"]["equal"]
    assert [one["result"] for one in debug["versions"]] == ["serves"]
    (memory,), (rank,) = debug["memory"], status["ranks"]
    assert memory["resident_bytes"] > rank["arena_bytes"]
    assert memory["staged_bytes"] == 0


async def _ends_at_once(engine, client: EngineClient, asked: engine_pb2.GenerateRequest) -> None:
    """SIGTERM: the kept stream and the one at the gate get their end, long before the grace."""
    kept = client.generate(asked)
    await anext(kept)
    await client.pause(engine_pb2.PauseGenerationRequest())
    waiting = asyncio.ensure_future(last_of(client, request()))

    async def waits() -> bool:
        return (await client.status()).waiting_at_gate == 1

    await eventually(waits)
    began = time.monotonic()
    os.kill(engine.pid, signal.SIGTERM)
    assert [message async for message in kept][-1].finish_reason == ABORT
    assert (await waiting).finish_reason == ABORT
    assert engine.wait() == 0
    assert time.monotonic() - began < GRACE_SECONDS


@pytest.mark.full
async def test_a_rank_killed_while_paused(stage: Stage, model: Path) -> None:
    """Kept streams and those at the gate end UNAVAILABLE, and the service exits."""
    engine = stage.engine(model)
    status = await reach(engine)
    assert status.state == READY
    async with EngineClient(engine.address) as client:
        kept = client.generate(request(max_tokens=1800))
        await anext(kept)
        await client.pause(engine_pb2.PauseGenerationRequest())
        waiting = asyncio.ensure_future(last_of(client, request()))

        async def waits() -> bool:
            return (await status_of(engine)).waiting_at_gate == 1

        await eventually(waits)
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(ClientError) as caught:
            _ = [message async for message in kept]
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(ClientError) as caught:
            await waiting
        assert caught.value.code == "UNAVAILABLE"
    assert engine.wait() == 1
