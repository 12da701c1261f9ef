"""Instances of several ranks: seeded rank by rank, equal to one rank, and whole or gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from stage import (
    DUMMY,
    Stage,
    answer,
    eventually,
    health,
    reach,
    refusal,
    request,
    seedrelay,
)

from clients.engine import EngineClient
from clients.errors import ClientError
from engine_service.checkpoint import smollm2
from seedrelay.v1 import engine_pb2

SERVICE = "seedrelay.v1.EngineService"
TRANSPORTS = ("shm", "grpc")
LONG = "The sea is salty because " * 6


@pytest.fixture
def model_of(make_model: Callable[..., Path]) -> Callable[[str], Path]:
    """Returns the folder of a float32 model by name."""

    def folder(name: str) -> Path:
        if name == "smollm2":
            return smollm2.fetch("float32").path
        return make_model("even", hidden_size=128, layers=4, vocab_size=4096, tied=False)

    return folder


def _without_weights(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors*"))
    return into


@pytest.mark.parametrize(
    ("name", "ranks", "transport"),
    [
        ("random", 2, "shm"),
        *(
            pytest.param(name, ranks, transport, marks=pytest.mark.full)
            for name, ranks in (("random", 1), ("random", 2), ("smollm2", 1), ("smollm2", 3))
            for transport in TRANSPORTS
            if (name, ranks, transport) != ("random", 2, "shm")
        ),
    ],
)
async def test_a_filled_target_equals_one_rank_from_disk(
    stage: Stage, model_of: Callable[[str], Path], name: str, ranks: int, transport: str
) -> None:
    """Equal digests on every rank, the tokens of one rank, and nothing has moved."""
    folder = model_of(name)
    relay = stage.relay()
    alone = stage.engine(folder)
    await reach(alone)
    expected = [await answer(alone, asked) for asked in _asked()]
    alone.stop()
    tp = ("--tp", str(ranks))
    seed = stage.engine(folder, *tp, "--relay", relay.address, "--weight-version", "v7")
    seeded = await reach(seed)
    bare = _without_weights(folder, stage.folder / "bare")
    target = stage.engine(bare, *tp, "--load-format", "dummy")
    before = await reach(target, DUMMY)
    pulled = await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", relay.address,
        "--transport", transport, "--json",
    )  # fmt: skip
    assert pulled.status == 0, pulled.err
    filled = await reach(target)
    assert pulled.json()["transport"] == transport
    assert pulled.json()["bytes_reread"] == 0
    assert [rank.rank for rank in filled.ranks] == list(range(ranks))
    assert [rank.digest for rank in filled.ranks] == [rank.digest for rank in seeded.ranks]
    assert len({rank.digest for rank in filled.ranks}) == ranks
    assert filled.weights_digest == seeded.weights_digest != ""
    assert [r.arena_address for r in filled.ranks] == [r.arena_address for r in before.ranks]
    assert all(rank.sealed for rank in [*seeded.ranks, *filled.ranks])
    assert [await answer(seed, asked) for asked in _asked()] == expected
    assert [await answer(target, asked) for asked in _asked()] == expected
    together = await asyncio.gather(*(answer(target, asked) for asked in _asked()))
    assert list(together) == expected


async def test_what_does_not_divide_ends_the_start(
    stage: Stage, make_model: Callable[..., Path]
) -> None:
    """The service says the numbers and exits; no rank waits for another."""
    folder = make_model("tiny", hidden_size=128, layers=4, vocab_size=4096)
    engine = stage.engine(folder, "--tp", "3")
    assert await asyncio.to_thread(engine.process.wait, 90) == 1
    assert "8 heads cannot be split over 3 ranks" in engine.log_tail()


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.full)])
async def test_one_killed_rank_is_the_end_of_all(
    stage: Stage, model_of: Callable[[str], Path], killed: int
) -> None:
    """Streams end UNAVAILABLE, health says so within 2 s, every process ends, rank named."""
    engine = stage.engine(model_of("random"), "--tp", "2", "--collective-timeout", "600")
    status = await reach(engine)
    processes = engine.processes()
    assert len(processes) == 1 + len(status.ranks)
    async with EngineClient(engine.address) as client:
        stream = client.generate(request(max_tokens=1900))
        await anext(stream)
        os.kill(status.ranks[killed].pid, signal.SIGKILL)
        with pytest.raises(ClientError) as caught:
            async for _ in stream:
                pass
    assert caught.value.code == "UNAVAILABLE"

    async def not_serving() -> bool:
        return await health(engine, SERVICE) == "NOT_SERVING"

    await eventually(not_serving, seconds=2)
    assert (await refusal(engine, request())).code == "UNAVAILABLE"
    assert engine.wait() == 1
    assert f"rank {killed}" in engine.log_tail()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.full
async def test_one_stopped_rank_costs_the_timeout(
    stage: Stage, model_of: Callable[[str], Path]
) -> None:
    """A rank that hangs in the middle of a stream ends it within the collective timeout."""
    engine = stage.engine(model_of("random"), "--tp", "2", "--collective-timeout", "15")
    status = await reach(engine)
    processes = engine.processes()
    async with EngineClient(engine.address) as client:
        stream = client.generate(request(max_tokens=1900))
        await anext(stream)
        os.kill(status.ranks[1].pid, signal.SIGSTOP)
        with pytest.raises(ClientError) as caught:
            await asyncio.wait_for(_read_to_the_end(stream), 30)
    assert caught.value.code == "UNAVAILABLE"
    assert await asyncio.to_thread(engine.process.wait, 60) == 1
    assert "did not come to the" in engine.log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


async def _read_to_the_end(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


def _asked() -> list[engine_pb2.GenerateRequest]:
    return [request(max_tokens=32), request(LONG, max_tokens=24)]
