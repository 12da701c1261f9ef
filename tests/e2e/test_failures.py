"""Whoever dies or hangs during a pull: the target is right or says why, and nothing is left.

`stop` is SIGSTOP: a process that hangs, holds its sockets and wakes up late.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from failures import (
    RATE,
    Cast,
    Filling,
    assert_serves,
    halfway,
    held,
    lets_go,
    no_leases,
    relay_status,
    runs,
    settles,
    start_pull,
)
from stage import DUMMY, eventually, status_of

from clients.launch import Service

BLOCK_BYTES = 1 << 20
VICTIMS = {
    "grpc": ("target_relay", "seed", "seed_relay", "target", "directory"),
    "tcp": ("target_relay", "seed", "seed_relay", "target"),
    "shm": ("target_relay", "neighbour", "target"),
}
SAMPLE = {
    ("target_relay", "kill", 50, "grpc"),
    ("seed", "kill", 10, "tcp"),
    ("seed_relay", "stop", 50, "tcp"),
    ("target", "kill", 99, "shm"),
    ("directory", "stop", 50, "grpc"),
}
"""Every victim, signal, point and transport; what needs the bounds on hanging peers most."""


def _matrix() -> Iterator[object]:
    for transport, victims in VICTIMS.items():
        for victim in victims:
            for how in ("kill", "stop"):
                for percent in (10, 50, 99):
                    case = (victim, how, percent, transport)
                    marks = () if case in SAMPLE else (pytest.mark.full,)
                    yield pytest.param(*case, marks=marks)


@pytest.fixture
async def target(cast: Cast) -> AsyncIterator[Service]:
    """A dummy; when it has gone every survivor holds what it held before it came."""
    await cast.whole()
    before = {role: held(service) for role, service in cast.roles.items()}
    pids = {role: service.pid for role, service in cast.roles.items()}
    target = await cast.dummy()
    yield target
    target.stop()
    for role in cast.roles:
        await cast.restore(role)
    await cast.whole()
    for role, service in cast.roles.items():
        if service.pid == pids[role]:
            await lets_go(service, before[role])
        assert not (await relay_status(cast.roles["target_relay"])).transfers


@pytest.mark.parametrize(("victim", "how", "percent", "transport"), list(_matrix()))
async def test_matrix(
    cast: Cast, target: Service, victim: str, how: str, percent: int, transport: str
) -> None:
    """A target whose fleet is hit ends with the right weights, or says what became of it."""
    relay = cast.roles["target_relay"]
    hit = target if victim == "target" else cast.roles[victim]
    processes = hit.processes()
    source = "b" if transport == "shm" else "a"
    only = source
    if victim == "seed_relay":
        await cast.unleased()  # else a lease of the case before may have another asked first
        only = ""
    filling = start_pull(target, relay, only, transport, rate_limit_bytes_per_second=RATE)
    await halfway(relay, percent)
    _hit(hit, processes, how)
    expect = {"seed_relay": _fails_over, "target_relay": _loses_relay, "target": _leaves}
    await expect.get(victim, _finishes)(cast, target, how, source, filling)
    if how == "kill":
        await eventually(lambda: not any(map(runs, processes)))


def _hit(service: Service, processes: list[int], how: str) -> None:
    """Kills the front alone: its ranks must go by themselves. Stops every process."""
    if how == "kill":
        service.kill()
    else:
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)


async def _finishes(cast: Cast, target: Service, how: str, source: str, filling: Filling) -> None:
    """The pull needs nothing of the victim, and neither does who asks how it goes."""
    outcome = await filling
    assert outcome.path == [(source, "complete")]
    assert outcome.bytes_wasted == 0
    await relay_status(cast.roles["target_relay"])
    await eventually(lambda: no_leases(cast.roles["seed_relay"]))
    await assert_serves(target, cast)


async def _fails_over(cast: Cast, target: Service, how: str, source: str, filling: Filling) -> None:
    """What is missing, and no more, comes from the other seed."""
    outcome = await filling
    (left, reason), *others = outcome.path
    assert left == source
    assert reason.startswith("slow: nothing came for") or how == "kill"
    if reason == "complete":  # the last block was on its way when its sender was killed
        await assert_serves(target, cast)
        return
    assert others[-1] == ("b", "complete")
    assert {name for name, _ in others} <= {source, "b"}
    assert outcome.bytes_wasted <= BLOCK_BYTES
    assert min(outcome.report.path[0].bytes_verified, outcome.report.path[-1].bytes_verified) > 0
    await assert_serves(target, cast)


async def _loses_relay(
    cast: Cast, target: Service, how: str, source: str, filling: Filling
) -> None:
    """The fill fails and says where it was; the same target is filled by the next one."""
    outcome = await filling
    assert outcome.error is not None
    assert outcome.error.code == "UNAVAILABLE"
    assert f"the relay was lost during the pull from {source} (" in outcome.error.message
    assert ("said nothing for 10 s" in outcome.error.message) == (how == "stop")
    assert (await status_of(target)).state == DUMMY
    if how == "kill":
        await cast.restore("target_relay")
        await cast.whole()
        again = await start_pull(target, cast.roles["target_relay"], source)
    else:
        again = await start_pull(target, cast.roles["directory"], "a")
    assert again.path[-1][1] == "complete", again
    assert again.report.blocks_reused > 0  # found in the arena: no relay told this one of them
    await assert_serves(target, cast)
    if how == "stop":
        await _wakes_up_late(cast, target)


async def _wakes_up_late(cast: Cast, target: Service) -> None:
    """What a relay wrote, had it been awake, cannot reach weights that serve.

    It maps the target's arena twice: to fill it, and for others to read what has landed.
    """
    relay = cast.roles["target_relay"]
    assert held(relay)[relay.pid]["mapped"] == 3, "its neighbour's arena, and the target's of old"
    await cast.restore("target_relay")
    await settles(lambda: held(relay)[relay.pid]["mapped"], 1)
    await assert_serves(target, cast)


async def _leaves(cast: Cast, target: Service, how: str, source: str, filling: Filling) -> None:
    """A target that is killed takes its pull along; one that hangs finds itself filled."""
    relay = cast.roles["target_relay"]

    async def no_transfer() -> bool:
        return not (await relay_status(relay)).transfers

    await eventually(no_transfer)
    for one in (relay, cast.roles["seed_relay"]):
        await eventually(lambda one=one: no_leases(one))
    if how == "kill":
        assert (await filling).error is not None
        await settles(lambda: held(relay)[relay.pid]["mapped"], 1)
        return
    for pid in target.processes():
        os.kill(pid, signal.SIGCONT)
    outcome = await filling
    assert outcome.path == [(source, "complete")]
    await assert_serves(target, cast)
