"""A dummy becomes ready from a serving seed: through real services, real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from stage import (
    DUMMY,
    READY,
    Fleet,
    Stage,
    answer,
    health,
    reach,
    refusal,
    request,
    seedrelay,
    status_of,
)

from clients.engine import EngineClient
from seedrelay.v1 import weights_pb2

SERVICE = "seedrelay.v1.EngineService"


@pytest.mark.parametrize(
    ("tied", "dtype", "transport"),
    [
        (True, "float32", "shm"),
        (False, "bfloat16", "grpc"),
        pytest.param(True, "bfloat16", "tcp", marks=pytest.mark.full),
        pytest.param(False, "float32", "shm", marks=pytest.mark.full),
        pytest.param(False, "float32", "grpc", marks=pytest.mark.full),
        pytest.param(True, "float32", "grpc", marks=pytest.mark.full),
        pytest.param(True, "bfloat16", "shm", marks=pytest.mark.full),
        pytest.param(True, "bfloat16", "grpc", marks=pytest.mark.full),
        pytest.param(False, "bfloat16", "shm", marks=pytest.mark.full),
    ],
)
async def test_target_equals_a_fresh_process(
    stage: Stage, make_model: Callable[..., Path], *, tied: bool, dtype: str, transport: str
) -> None:
    """A target filled into an empty folder equals a fresh process on the same weights."""
    name = f"job-{tied}-{dtype}"
    folder = make_model(name, dtype=dtype, hidden_size=128, layers=3, tied=tied)
    relay = stage.relay()
    seed = stage.engine(folder, "--relay", relay.address, "--weight-version", "v7")
    target = stage.target(relay, "--transport", transport)
    seeded, filled = await reach(seed), await reach(target)
    assert filled.weights_digest == seeded.weights_digest != ""
    assert [r.digest for r in filled.ranks] == [r.digest for r in seeded.ranks]
    assert filled.weight_version == "v7"
    assert filled.model == name
    assert filled.fill.transport == transport
    assert [s.reason for s in filled.fill.path] == ["complete"]
    assert filled.fill.bytes_reread == 0
    assert all(rank.sealed for rank in [*seeded.ranks, *filled.ranks])
    long = request("seed " * 30, max_tokens=48)
    assert await answer(target, long) == await answer(seed, long)


async def test_chain_over_two_hosts_after_the_seed_died(stage: Stage, model: Path) -> None:
    """A filled target seeds the next one on another host after its own seed was killed."""
    relay = stage.relay()
    other = stage.relay("--join", relay.address)
    seed = stage.engine(model, "--relay", relay.address, "--weight-version", "v1")
    await reach(seed)
    expected = await answer(seed)
    first = stage.target(relay, "--instance-name", "first")
    await reach(first)
    seed.kill()
    second = stage.target(other, "--from", "first")
    status = await reach(second)
    assert status.fill.transport == "tcp"
    assert status.fill.path[-1].source_instance == "first"
    assert status.weight_version == "v1"
    assert await answer(second) == await answer(first) == expected


async def test_waits_for_pull_and_never_serves_before(
    stage: Stage, fleet: Fleet, model: Path
) -> None:
    """A dummy without a relay refuses requests until `seedrelay pull` has filled it."""
    relay, seed = fleet.relay, fleet.seed
    target = stage.engine(model, "--load-format", "dummy")
    before = await reach(target, DUMMY)
    refused = await refusal(target, request())
    assert (refused.code, refused.reason) == ("UNAVAILABLE", "NotReady")
    assert await health(target, SERVICE) == "NOT_SERVING"
    assert await health(target, "") == "SERVING"
    pulled = await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", relay.address,
        "--from", "seed", "--json",
    )  # fmt: skip
    assert pulled.status == 0, pulled.err
    report = pulled.json()
    assert report["state"] == "READY"
    assert report["bytes_moved"] > 0
    assert [(s["source_instance"], s["transport"]) for s in report["path"]] == [("seed", "shm")]
    after = await status_of(target)
    assert [r.arena_address for r in after.ranks] == [r.arena_address for r in before.ranks]
    assert await health(target, SERVICE) == "SERVING"
    assert await answer(target) == await answer(seed)
    again = await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", relay.address, "--json"
    )
    assert again.status == 1
    assert again.json()["error"]["code"] == "FAILED_PRECONDITION"


async def test_seed_streams_during_a_limited_pull(
    stage: Stage, make_model: Callable[..., Path]
) -> None:
    """The seed streams tokens while a pull, held to its rate limit, is under way."""
    model = make_model("wide", hidden_size=256, layers=6, vocab_size=8192)
    relay = stage.relay()
    seed = stage.engine(model, "--relay", relay.address)
    target = stage.engine(model, "--load-format", "dummy")
    await reach(seed)
    await reach(target, DUMMY)
    during = 0
    limit = 16 << 20
    options = weights_pb2.PullOptions(rate_limit_bytes_per_second=limit)
    async with EngineClient(seed.address) as seeding, EngineClient(target.address) as filling:
        stream = seeding.generate(request(max_tokens=1500))
        await anext(stream)
        pull = asyncio.ensure_future(_pull(filling, relay.address, options))
        async for _ in stream:
            during += 1
            if pull.done():
                break
        report = await pull
        await stream.aclose()
    assert during > 10
    assert report.seconds_transfer > 0.9 * (report.bytes_moved - (1 << 20)) / limit


async def test_graphs_are_captured_while_bytes_land(stage: Stage, fleet: Fleet) -> None:
    """The report shows that neither the capture nor the way to the bytes waits for the other."""
    target = stage.target(fleet.relay, "--rate-limit", "1MiB/s")
    phases = {p.name: p for p in (await reach(target)).phases}
    assert phases["land"].begin_seconds < phases["capture"].begin_seconds
    assert phases["capture"].begin_seconds < phases["land"].end_seconds


async def test_relay_has_no_torch(fleet: Fleet) -> None:
    """The relay's process and an engine's front map no torch, while an engine's rank does."""
    status = await status_of(fleet.seed)
    assert "libtorch" not in Path(f"/proc/{fleet.relay.pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{fleet.seed.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{status.ranks[0].pid}/maps").read_text()


async def _pull(
    client: EngineClient, relay: str, options: weights_pb2.PullOptions
) -> weights_pb2.PullReport:
    *_, last = [message async for message in client.pull(relay, options)]
    return last.report


async def test_a_wrong_relay_does_not_spoil_a_dummy(
    stage: Stage, fleet: Fleet, model: Path
) -> None:
    """After a pull through a relay that isn't one the dummy is filled through the right one."""
    target = stage.engine(model, "--load-format", "dummy")
    await reach(target, DUMMY)
    for wrong in (fleet.seed.address, "127.0.0.1:1"):
        refused = await asyncio.to_thread(
            seedrelay, "pull", "--engine", target.address, "--relay", wrong, "--json"
        )
        assert refused.status == 1
        assert wrong in refused.err
    pulled = await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", fleet.relay.address,
        "--from", "tiny", "--json",
    )  # fmt: skip
    assert pulled.status == 0, pulled.err
    assert pulled.json()["model"] == "tiny"
    assert (await status_of(target)).state == READY
