"""Fills that are interrupted, and fleets whose members come and go: what becomes of them."""

from __future__ import annotations

import os
import signal

import pytest
from failures import (
    RATE,
    Cast,
    assert_serves,
    halfway,
    held,
    no_leases,
    relay_status,
    settles,
    start_pull,
)
from fakes import FakeEngine, Memory, random_bytes, seam_layout
from proxy import Proxy
from stage import DUMMY, Stage, answer, eventually, reach, seedrelay

from clients.errors import ClientError
from clients.launch import Service
from clients.relay import RelayClient
from relay_service.core.registry import EXPIRY_SECONDS

BLOCK_BYTES = 1 << 20


def _target(stage: Stage, cast: Cast, *arguments: str) -> Service:
    """Starts a target that fills itself from the seed of the other host."""
    relay = cast.roles["target_relay"]
    return stage.target(relay, "--from", "a", "--rate-limit", str(RATE), *arguments)


async def test_a_cut_connection(cast: Cast, stage: Stage) -> None:
    """A source whose connection is cut is asked again, for what is missing and no more."""
    probe = stage.relay()  # takes a port that the relay gets once it is free
    probe.stop()
    proxy = Proxy(probe.address)
    relay = stage.relay(
        "--join", cast.roles["directory"].address, "--advertise", await proxy.start(),
        "--egress-limit", str(RATE), listen=probe.address,
    )  # fmt: skip
    seed = stage.engine(
        cast.model, "--relay", relay.address, "--instance-name", "p", "--weight-version", "v4"
    )
    target = stage.engine(cast.model, "--load-format", "dummy")
    await reach(seed)
    await reach(target, DUMMY)
    filling = start_pull(
        target, cast.roles["target_relay"], "p", "grpc", rate_limit_bytes_per_second=RATE
    )
    await halfway(cast.roles["target_relay"], 50)
    assert proxy.cut()
    outcome = await filling
    (first, reason), last = outcome.path
    assert (first, last) == ("p", ("p", "complete"))
    assert reason != "complete"
    assert all(step.bytes_verified for step in outcome.report.path)
    assert outcome.bytes_wasted <= BLOCK_BYTES
    await assert_serves(target, cast)
    await eventually(lambda: no_leases(relay))
    proxy.close()


@pytest.mark.full
async def test_a_source_that_comes_back(cast: Cast, stage: Stage) -> None:
    """A target whose only source went away fills on from it when it is back, with what it has."""
    target = _target(stage, cast, "--deadline", "60")
    at = await halfway(cast.roles["target_relay"], 50)
    cast.roles["seed_relay"].kill()
    await cast.restore("seed_relay")
    status = await reach(target)
    assert status.fill.blocks_reused > 0
    assert status.fill.bytes_moved <= at.bytes_total - at.bytes_verified
    assert status.fill.path[-1].bytes_verified == status.fill.bytes_moved
    await assert_serves(target, cast)


@pytest.mark.full
async def test_a_deadline_tells_the_whole_path(cast: Cast, stage: Stage) -> None:
    """A target that no source fills in time ends, and says which were tried and why left."""
    target = _target(stage, cast, "--deadline", "8")
    await halfway(cast.roles["target_relay"], 50)
    cast.roles["seed_relay"].kill()
    ended = target.wait()
    await cast.restore("seed_relay")
    await cast.whole()
    assert ended == 1
    assert "not filled within 8 s of its start: a (grpc): " in target.log_tail()


async def test_a_target_that_is_told_to_stop(cast: Cast, stage: Stage) -> None:
    """SIGTERM in the middle of a fill is no failure, and nothing of it remains."""
    relay = cast.roles["target_relay"]
    target = _target(stage, cast)
    await halfway(relay, 10)
    assert target.stop() == 0
    assert not (await relay_status(relay)).transfers
    await eventually(lambda: no_leases(cast.roles["seed_relay"]))
    await settles(lambda: held(relay)[relay.pid]["mapped"], 1)


@pytest.mark.full
async def test_a_relay_wakes_up_after_the_fallback(cast: Cast, stage: Stage) -> None:
    """A target that gave up on a hanging relay serves from disk; the relay cannot change that."""
    relay = cast.roles["target_relay"]
    target = stage.target(
        relay, "--from", "a", "--rate-limit", str(RATE), "--deadline", "8", "--fallback", "disk",
        "--weight-version", "v4", model=cast.model,
    )  # fmt: skip
    await halfway(relay, 50)
    os.kill(relay.pid, signal.SIGSTOP)
    await reach(target)
    await assert_serves(target, cast)
    await cast.restore("target_relay")
    listed = await eventually(lambda: _listed(relay, 3))
    assert {"a", "b", target.instance} == set(listed)
    await assert_serves(target, cast)
    assert target.stop() == 0
    await cast.whole()


@pytest.mark.full
async def test_a_rank_that_hangs(cast: Cast, stage: Stage) -> None:
    """A target whose rank hangs is not ready at its deadline: it says so and ends."""
    target = _target(stage, cast, "--deadline", "8")
    await halfway(cast.roles["target_relay"], 10)
    _, worker = target.processes()
    os.kill(worker, signal.SIGSTOP)
    assert target.wait() == 1
    assert "not filled within 8 s of its start: still LANDING" in target.log_tail()


async def test_a_name_and_a_rank_that_are_taken_or_absent(cast: Cast, stage: Stage) -> None:
    """A second process of a name is refused and hurts nobody; a rank that isn't there is told."""
    relay = cast.roles["seed_relay"]
    twin = stage.engine(cast.model, "--relay", relay.address, "--instance-name", "a")
    assert twin.wait() == 1
    assert "an instance named a is attached already" in twin.log_tail()
    assert await answer(cast.roles["seed"]) == cast.tokens
    (seed,) = [one for one in (await relay_status(relay)).instances if one.instance == "a"]
    async with RelayClient(relay.address) as client:
        with pytest.raises(ClientError, match="no rank 7") as refused:
            await client.manifest("a", seed.generation, 7)
    assert refused.value.code == "NOT_FOUND"


@pytest.mark.full
async def test_a_directory_that_hangs_and_starts_anew(stage: Stage) -> None:
    """It holds up nobody, and lists who stays, not who left or died meanwhile."""
    directory = stage.relay()
    relays = {
        name: stage.relay("--join", directory.address) for name in ("stays", "leaves", "dies")
    }
    layout = seam_layout()
    engines = [FakeEngine(name, Memory([layout], [random_bytes(layout)])) for name in relays]
    for engine in engines:
        async with RelayClient(relays[engine.name].address) as client:
            path, _ = await client.attachment()
        await engine.attach(path)
    await eventually(lambda: _listed(directory, 3))
    os.kill(directory.pid, signal.SIGSTOP)
    shown = seedrelay("status", relays["stays"].address, "--json")
    assert [one["instance"] for one in shown.json()["instances"]] == ["stays"]
    assert relays["leaves"].stop() == 0
    directory.kill()
    again = stage.relay_again(directory)
    assert set(await eventually(lambda: _listed(again, 2))) == {"stays", "dies"}
    relays["dies"].kill()
    assert await eventually(lambda: _listed(again, 1), EXPIRY_SECONDS + 1) == ["stays"]
    for engine in engines:
        engine.close()


async def _listed(relay: Service, count: int) -> list[str]:
    """Returns the names of the fleet once there are so many; empty before."""
    names = [one.instance for one in (await relay_status(relay)).instances]
    return names if len(names) == count else []
