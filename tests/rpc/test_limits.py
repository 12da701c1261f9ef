"""Limits of a relay: what they bound, over every transport. A slow machine only keeps them more."""

import asyncio
import time

import pytest
from fakes import eventually, lay_out_bytes, random_bytes

from relay_service.core.manifest import BLOCK_BYTES
from seedrelay.v1 import weights_pb2

BLOCKS = 4
LIMIT = 20 * BLOCK_BYTES
TRANSPORTS = ["shm", "tcp", "grpc"]


@pytest.fixture
def hosts(fleet):
    """Starts the relay of the sources and, for transports between hosts, another one."""
    fleet.layout = lay_out_bytes([BLOCKS * BLOCK_BYTES])
    fleet.data = random_bytes(fleet.layout)

    async def start(transport: str, *, here=None, there=None):
        if transport == "shm":
            relay = await fleet.relay(**{**(here or {}), **(there or {})})
            return relay, relay
        source = await fleet.relay(**(here or {}))
        return source, await fleet.relay(join=source.address, **(there or {}))

    return start


async def fill(fleet, relay, transport: str, sources: dict[str, str]) -> float:
    """Fills targets, by name, from their sources at once; returns the seconds that it took."""
    client = fleet.client(relay)

    async def one(target: str, source: str):
        options = weights_pb2.PullOptions(transport=transport, source_instance=source)
        return [m async for m in client.pull(target, options)][-1].report

    for target in sources:
        await fleet.dummy(relay, target)
    began = time.monotonic()
    reports = await asyncio.gather(*(one(*pair) for pair in sources.items()))
    assert {report.transport for report in reports} == {transport}
    return time.monotonic() - began


def least_seconds(blocks: int) -> float:
    """Returns how long so many blocks take within the limit; the first one passes at once."""
    return (blocks - 1) * BLOCK_BYTES / LIMIT


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_ingress_bounds_all_pulls_together(fleet, hosts, transport):
    """Two targets of one relay share what it takes in."""
    limit = {"ingress_limit_bytes_per_second": LIMIT}
    here, there = await hosts(transport, there=limit)
    await fleet.seed(here)
    took = await fill(fleet, there, transport, {"a": "seed", "b": "seed"})
    assert took >= least_seconds(2 * BLOCKS)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_egress_of_one_instance(fleet, hosts, transport):
    """Readers of one instance share what it gives; those of another one have that one's share."""
    limit = {"egress_limit_per_instance_bytes_per_second": LIMIT}
    here, there = await hosts(transport, here=limit)
    for name in ("seed", "twin"):
        await fleet.seed(here, name)
    took = await fill(fleet, there, transport, {"a": "seed", "b": "seed", "c": "twin"})
    assert took >= least_seconds(2 * BLOCKS)
    pace = [here.holdings.get(name).egress for name in ("seed", "twin")]
    assert [limit.bytes_per_second for limit in pace] == [LIMIT, LIMIT]
    assert pace[0] is not pace[1]


async def test_egress_of_an_instance_within_that_of_its_relay(fleet, hosts):
    """Where both are limited both hold."""
    here, there = await hosts(
        "tcp",
        here={
            "egress_limit_per_instance_bytes_per_second": 100 * LIMIT,
            "egress_limit_bytes_per_second": LIMIT,
        },
    )
    for name in ("seed", "twin"):
        await fleet.seed(here, name)
    await eventually(lambda: there._fleet.directory_reachable)
    took = await fill(fleet, there, "tcp", {"a": "seed", "b": "twin"})
    assert took >= least_seconds(2 * BLOCKS)
