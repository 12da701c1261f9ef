"""The main job with ranks on a device that is a fake: real processes, sockets, descriptors."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from fake_cuda import FakeDriver
from relays import fleet as relays

from engine_service.config import EngineConfig
from engine_service.core.blocks import BlockPool
from engine_service.core.bring_up import BringUp
from engine_service.core.engine import Engine
from engine_service.core.fill import Filler
from engine_service.core.instance import Identity, Instance
from engine_service.core.ranks import RankGroup
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Row, Sampling
from engine_service.rpc.convert import status_to_proto
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.instance import State
from relay_service.memory import cuda_driver

__all__ = ["relays"]

TESTS = Path(__file__).parents[1]
ROWS = (Row((1, 2, 3), 0, (0,), 0, Sampling()),)
Start = Callable[..., Awaitable[Instance]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts instances whose ranks find a fake device, as the relay of this process does."""
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {TESTS}/fake_worker.py "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    started = []

    async def start(model: Path, ranks: int, relay: str, load_format: str) -> Instance:
        config = EngineConfig(
            model=str(model), listen="127.0.0.1:0", load_format=load_format, threads=1,
            kv_cache_tokens=256, weight_version="v5", relay=relay, device="cuda",
            tensor_parallel_size=ranks, deadline_seconds=120,
        )  # fmt: skip
        workers = await RankGroup.spawn(ranks, 1)
        scheduler = Scheduler(Limits(256, 8, 8, 16), BlockPool(16, 16))
        identity = Identity(load_format, f"life of {load_format}", model.name)
        engine = Engine(scheduler, workers)
        instance = Instance(config, identity, workers, engine, GrpcRelayLink)
        started.append(instance)
        await BringUp(instance, Filler(instance)).run()
        return instance

    yield start
    for instance in started:
        await instance.close()
    assert not +driver.live


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_target_on_a_device_is_filled_from_a_seed_on_one(
    relays, start: Start, model: Path, ranks: int
) -> None:
    """Both descriptors of every rank reach the relay; the target computes what the seed does."""
    relay = await relays.relay()
    seed = await start(model, ranks, relay.address, "disk")
    assert seed.lifecycle.state is State.READY, seed.lifecycle.reason
    target = await start(model, ranks, relay.address, "dummy")
    assert target.lifecycle.state is State.READY, target.lifecycle.reason
    assert target.engine.weights.digest == seed.engine.weights.digest
    assert target.fill_report.transport == "shm"
    assert await target.ranks.step(ROWS) == await seed.ranks.step(ROWS)
    for rank in status_to_proto(target).ranks:
        assert (rank.page_kind, rank.sealed) == ("cuda:0", True)
