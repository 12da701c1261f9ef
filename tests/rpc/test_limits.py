"""Limits of a relay: whose bytes each of them counts, over every transport.

That what was counted is waited for, `tests/core/test_rate.py` shows.
"""

import asyncio

import pytest
from fakes import lay_out_bytes, random_bytes

from relay_service.core.manifest import BLOCK_BYTES
from seedrelay.v1 import weights_pb2

BLOCKS = 4
SIZE = BLOCKS * BLOCK_BYTES
FAST = 1000 * BLOCK_BYTES
TRANSPORTS = ["shm", "tcp", "grpc"]


@pytest.fixture
def hosts(fleet):
    """Starts the relay of the sources and, for transports between hosts, another one."""
    fleet.layout = lay_out_bytes([SIZE])
    fleet.data = random_bytes(fleet.layout)

    async def start(transport: str, *, here=None, there=None):
        if transport == "shm":
            relay = await fleet.relay(**(here or {}), **(there or {}))
            return relay, relay
        source = await fleet.relay(**(here or {}))
        return source, await fleet.relay(join=source.address, **(there or {}))

    return start


def counted(bucket, monkeypatch) -> list[int]:
    """Returns a list to which a limit adds, from here on, what it counts."""
    assert bucket.bytes_per_second == FAST
    taken, delay = [], bucket.delay

    def count(nbytes: int) -> float:
        taken.append(nbytes)
        return delay(nbytes)

    monkeypatch.setattr(bucket, "delay", count)
    return taken


def is_all_of(taken: list[int], copies: int) -> bool:
    """Whether a limit has counted so many copies of the weights.

    Of each, a block may be counted that another thread has taken by then, or framing.
    """
    return copies * SIZE <= sum(taken) <= copies * (SIZE + BLOCK_BYTES)


async def fill(fleet, relay, transport: str, sources: dict[str, str]) -> None:
    """Fills targets, by name, from their sources at once."""
    client = fleet.client(relay)

    async def one(target: str, source: str):
        options = weights_pb2.PullOptions(transport=transport, source_instance=source)
        return [m async for m in client.pull(target, options)][-1].report

    for target in sources:
        await fleet.dummy(relay, target)
    reports = await asyncio.gather(*(one(*pair) for pair in sources.items()))
    assert {report.transport for report in reports} == {transport}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_ingress_is_of_all_pulls_together(fleet, hosts, monkeypatch, transport):
    """Two targets of one relay share what it takes in."""
    limit = {"ingress_limit_bytes_per_second": FAST}
    here, there = await hosts(transport, there=limit)
    taken = counted(there.transfers._ingress, monkeypatch)
    await fleet.seed(here)
    await fill(fleet, there, transport, {"a": "seed", "b": "seed"})
    assert is_all_of(taken, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_egress_is_of_a_relay_and_of_each_instance(fleet, hosts, monkeypatch, transport):
    """Readers of one instance share what it gives; all readers, what the relay gives."""
    limits = {
        "egress_limit_per_instance_bytes_per_second": FAST,
        "egress_limit_bytes_per_second": FAST,
    }
    here, there = await hosts(transport, here=limits)
    for name in ("seed", "twin"):
        await fleet.seed(here, name)
    of_relay = counted(here._data_server._egress, monkeypatch)
    of_seed = counted(here.holdings.get("seed").egress, monkeypatch)
    of_twin = counted(here.holdings.get("twin").egress, monkeypatch)
    await fill(fleet, there, transport, {"a": "seed", "b": "seed", "c": "twin"})
    assert is_all_of(of_relay, 3)
    assert is_all_of(of_seed, 2)
    assert is_all_of(of_twin, 1)
