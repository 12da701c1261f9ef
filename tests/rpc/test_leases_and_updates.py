"""A seed that is updated while others read it, through real relays and the engine's own link."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes import PROBE, Memory, attach_message, eventually, random_bytes, same_weights
from relays import LAYOUT
from updates import wanted

from clients.errors import CallFailed
from engine_service.core.update_readers import closed_to_readers
from engine_service.core.update_sources import Watched
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.instance import State, Weights
from relay_service.core.match import Target
from relay_service.rpc import directory_link
from seedrelay.v1 import weights_pb2

CHANGED = LAYOUT.block(LAYOUT.block_count - 1)
EVER = 60.0
"""A bound that no test reaches."""


@pytest.fixture(autouse=True)
def _renew_often(monkeypatch):
    """Announces often: what is under test is not how long news take."""
    monkeypatch.setattr(directory_link, "RENEW_SECONDS", 0.2)


class Seed:
    """An engine without torch that serves, and is updated in place."""

    def __init__(self, relay, data: bytes) -> None:
        self.memory = Memory([LAYOUT], [data])
        self.weights = Weights("v1", self.memory.digest, 1)
        self.link = GrpcRelayLink(relay.address)
        end = CHANGED.offset + CHANGED.nbytes
        self.new = data[: CHANGED.offset] + bytes(CHANGED.nbytes) + data[end:]
        right = Memory([LAYOUT], [self.new])
        self.digests = {"v1": self.memory.digest, "v2": right.digest}
        self.contents = {"v1": data, "v2": self.new}
        right.close()

    async def attach(self) -> None:
        """Attaches."""
        await self.link.attach(self._describe, lambda: self.memory.descriptors)

    def closed(self, seconds: float, watched: Watched | None = None):
        """Waits for readers, as an engine that is about to commit."""
        instance = SimpleNamespace(
            link=self.link, config=SimpleNamespace(lease_wait_seconds=seconds),
            tell_relay=self.link.update,
        )  # fmt: skip
        return closed_to_readers(instance, wanted(), watched or Watched())

    async def update(self, seconds: float):
        """Becomes v2; returns how it waited."""
        async with self.closed(seconds) as waited:
            (arena,) = self.memory.arenas
            arena.sequence += 1
            self.memory.fill([self.new])
            arena.sequence += 1
            self.weights = Weights("v2", self.memory.digest, 2)
        await self.link.update()
        return waited

    def _describe(self):
        return attach_message("seed", self.memory, weights=self.weights, probe=PROBE)

    async def close(self) -> None:
        """Leaves."""
        await self.link.close()
        self.memory.close()


@pytest.fixture
async def seeding(fleet):
    """Starts a seed on a relay of its own."""
    running = []

    async def start(**settings):
        relay = await fleet.relay(**settings)
        seed = Seed(relay, random_bytes(LAYOUT))
        running.append(seed)
        await seed.attach()
        return relay, seed

    yield start
    for seed in running:
        await seed.close()


async def pull(fleet, relay, name: str = "target"):
    """Pulls to the end; returns the report."""
    options = weights_pb2.PullOptions(timeout={"seconds": 30})
    *_, last = [m async for m in fleet.client(relay).pull(name, options)]
    return last.report


async def lease(fleet, relay, seed, holder: str = "reader"):
    """Takes a lease on what the seed serves."""
    (found,) = [m.instance for m in await fleet.client(relay).sources(Target())]
    assert found.weights.digest == seed.digests["v1"]
    return found, await fleet.client(relay).acquire_lease(found, holder)


@pytest.mark.parametrize(("targets", "bound"), [(1, 0.2), (3, 0.2), (1, EVER), (2, 0)])
async def test_an_update_under_readers(fleet, seeding, targets, bound):
    """Each target ends on one version, whole; what it has of the old one it doesn't read again."""
    here, seed = await seeding(egress_limit_bytes_per_second=8 << 20)
    there = [await fleet.relay(join=here.address) for _ in range(targets)]
    for number, relay in enumerate(there):
        await fleet.dummy(relay, f"target {number}")
    pulls = [
        asyncio.create_task(pull(fleet, relay, f"target {number}"))
        for number, relay in enumerate(there)
    ]
    await eventually(lambda: all(r.transfers.running for r in there))
    await eventually(lambda: all(r.transfers.running[0].puller.blocks_landed > 1 for r in there))
    waited = await seed.update(bound)
    reports = await asyncio.gather(*pulls)
    assert waited.leases_ended == (1 if bound == 0.2 else 0)
    assert waited.readers == (1 if bound else 0)
    versions = []
    for number, (relay, report) in enumerate(zip(there, reports, strict=True)):
        assert report.weights_digest == seed.digests[report.weight_version]
        receiver = relay.holdings.get(f"target {number}").receivers[0]
        assert receiver.complete
        data = bytes(receiver._arena.view(0, LAYOUT.data_bytes))
        assert same_weights(LAYOUT, data, seed.contents[report.weight_version])
        fresh = report.bytes_moved - report.bytes_reread
        assert fresh <= LAYOUT.weight_bytes + CHANGED.nbytes
        versions.append(report.weight_version)
    assert versions == (["v1"] if bound == EVER else ["v2"] * targets)
    assert here.holdings.leases.count() == 0


async def test_a_reader_that_never_comes_back(fleet, seeding):
    """It holds the update for the bound; then its lease ends, and says what has happened."""
    relay, seed = await seeding()
    found, held = await lease(fleet, relay, seed)
    async with asyncio.timeout(10):  # its lease lasts for thirty
        waited = await seed.update(0.3)
    assert (waited.readers, waited.leases_ended) == (1, 1)
    client = fleet.client(relay)
    with pytest.raises(CallFailed, match="its weights are updated to v2") as ended:
        await client.grant_read(held.lease, 0, [(0, 1)], 1)
    assert (ended.value.code, ended.value.reason) == ("FAILED_PRECONDITION", "EpochChanged")
    with pytest.raises(CallFailed, match="holds other weights by now"):
        await client.acquire_lease(found, "reader")


async def test_nobody_begins_while_it_waits(fleet, seeding):
    """New readers are told that it will change; a target waits, and gets what comes then."""
    here, seed = await seeding()
    there = await fleet.relay(join=here.address)
    await fleet.dummy(there)
    client = fleet.client(here)
    found = next(m.instance for m in await client.sources(Target()) if m.fits)
    held = await client.acquire_lease(found, "reader")
    updating = asyncio.create_task(seed.update(EVER))
    holding = here.holdings.get("seed")
    await eventually(lambda: holding.changing_to)
    with pytest.raises(CallFailed, match="seed is about to change to v2") as refused:
        await client.acquire_lease(found, "late")
    assert refused.value.reason == "EpochChanged"
    assert refused.value.details["expected"] == "v2"
    states = {m.instance.instance: m.instance.state for m in await client.sources(Target())}
    assert states["seed"] is State.UPDATING
    pulling = asyncio.create_task(pull(fleet, there))
    await eventually(lambda: there.transfers.running)
    puller = there.transfers.running[0].puller
    await eventually(lambda: puller.report.note)
    await client.grant_read(held.lease, 0, [(0, 1)], 1)  # who reads may go on
    assert not updating.done()
    await client.release_lease(held.lease, 5)
    waited = await updating
    assert (waited.readers, waited.leases_ended) == (1, 0)
    assert (await pulling).weights_digest == seed.digests["v2"]


async def test_an_update_that_is_given_up(fleet, seeding):
    """After a commit that failed the old weights are read as before."""
    relay, seed = await seeding()
    found, held = await lease(fleet, relay, seed)
    with pytest.raises(OSError, match="given up"):
        async with seed.closed(0.1):
            raise OSError("given up")
    client = fleet.client(relay)
    with pytest.raises(CallFailed, match="updated to v2"):
        await client.grant_read(held.lease, 0, [(0, 1)], 1)
    again = await client.acquire_lease(found, "reader")
    await client.grant_read(again.lease, 0, [(0, 1)], 1)


async def test_a_relay_that_has_gone(fleet, seeding):
    """Nobody is waited for, and the engine goes on."""
    relay, seed = await seeding()
    await lease(fleet, relay, seed)
    await fleet.stop(relay)
    async with asyncio.timeout(10):
        waited = await seed.update(EVER)
    assert waited.leases_ended == 0
