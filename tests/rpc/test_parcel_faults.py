"""Sources of parcels that lie, change, go or hang: it costs time, and nothing is left behind."""

import asyncio

import pytest
from fakes import eventually
from parcel_scene import (
    NAMES,
    assert_right,
    disk,
    missing,
    pulled,
    seed,
    update,
)

from engine_service.core import parcel_relay
from engine_service.core.parcel_relay import RelayParcels
from engine_service.core.parcel_sources import fetch
from engine_service.errors import RecoveryFailed
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.manifest import BLOCK_BYTES

SLOW_BYTES = 2 << 20


def has_landed_a_unit(relay) -> bool:
    """Whether all blocks of some unit of a parcel have come."""
    receiver = relay.transfers.running[0].puller.receivers[0]
    blocks = [receiver.layout.blocks_at(u.offset, u.nbytes) for u in receiver.layout.units]
    return any(all(receiver.verified[n] for n in of_unit) for of_unit in blocks)


async def test_a_source_with_wrong_bytes(fleet, mine):
    """Its unit comes from another one; what it gave rightly stays."""
    relay = await fleet.relay()
    bad = await seed(fleet, relay, "a")
    units = {unit.name: unit for unit in bad.memory.manifests[1].units}
    bad.memory.arenas[1].land(units[NAMES[5]].offset + BLOCK_BYTES, b"wrong")
    lost = missing(4, 5)
    source = mine(relay)
    with pytest.raises(RecoveryFailed, match=r"a: .*rank 1, tensor 5\.up, block"):
        await fetch(lost, [source.relay_parcels()], timeout_seconds=60)
    await seed(fleet, relay, "b")
    found = await fetch(lost, [source.relay_parcels()], timeout_seconds=60)
    assert pulled(found)["relay:b"][-1] == NAMES[5]
    assert_right(found, lost)


async def test_a_source_that_goes_in_the_middle(fleet, mine):
    """What has landed of it stays; another one, of other placement, gives the rest."""
    dying = await fleet.relay(egress_limit_bytes_per_second=SLOW_BYTES)
    here = await fleet.relay(join=dying.address)
    first = await seed(fleet, dying, "first")
    lost, source = missing(4, 5, 6, 7), mine(here)
    running = asyncio.create_task(fetch(lost, [source.relay_parcels()], timeout_seconds=60))
    await eventually(lambda: here.transfers.running)
    await eventually(lambda: has_landed_a_unit(here))
    await seed(fleet, here, "second", groups=((6, 4, 2, 0), (7, 5, 3, 1)))
    await fleet.stop(dying)
    found = await running
    came = pulled(found)
    assert set(came) == {"relay:first", "relay:second"}
    assert sorted(came["relay:first"] + came["relay:second"]) == [NAMES[e] for e in (4, 5, 6, 7)]
    assert_right(found, lost)
    first.close()


async def test_a_source_that_was_updated_meanwhile(fleet, mine):
    """It is asked again by its new weights, for what is the same in them."""
    relay = await fleet.relay()
    held = await seed(fleet, relay)

    class Late(GrpcRelayLink):
        """Learns what the seed holds just before that changes."""

        async def manifests_of(self, instance):
            found = await super().manifests_of(instance)
            if instance.weights.epoch == 1:
                await update(held, other=(5,))
            return found

    lost, source = missing(4, 5), mine(relay, link=Late)
    folder, asked = disk()
    found = await fetch(lost, [source.relay_parcels(), folder], timeout_seconds=60)
    assert pulled(found) == {"relay:seed": [NAMES[4]], "disk:/models/tiny": [NAMES[5]]}
    assert asked == [(0, [NAMES[5]])]
    assert_right(found, lost)


async def test_a_source_that_is_updated_while_it_is_read(fleet, mine):
    """What came before counts, of what comes later only what is the same as before."""
    relay = await fleet.relay(egress_limit_bytes_per_second=SLOW_BYTES)
    held = await seed(fleet, relay)
    lost, source = missing(4, 5, 6, 7), mine(relay)
    folder, asked = disk()
    running = asyncio.create_task(fetch(lost, [source.relay_parcels(), folder], timeout_seconds=60))
    await eventually(lambda: relay.transfers.running)
    await eventually(lambda: has_landed_a_unit(relay))
    await update(held, other=(4, 5, 6))
    found = await running
    came = pulled(found)
    assert NAMES[7] in came["relay:seed"]
    assert [(0, came["disk:/models/tiny"])] == asked
    assert_right(found, lost)


async def test_a_relay_that_does_not_give_the_memory_back(fleet, mine, caplog):
    """Is cut off, and said to have kept it; what it has filled counts by its digests."""
    relay = await fleet.relay()
    await seed(fleet, relay)

    class Keeps(GrpcRelayLink):
        """Does not say that the relay gave up writing."""

        async def return_mapping(self):
            return False

    source, lost = mine(relay), missing(4)
    relayed = RelayParcels(source.link, Keeps, source.describe)
    found = await fetch(lost, [relayed], timeout_seconds=60)
    assert "did not say that it gave the memory of a parcel back" in caplog.text
    assert_right(found, lost)


async def test_a_relay_that_lies(fleet, mine):
    """Nobody's word is taken for what lies there."""
    relay = await fleet.relay()
    await seed(fleet, relay)

    class Lies(GrpcRelayLink):
        """Says that all has landed."""

        async def pull(self, options, on_progress):
            pass

    source = mine(relay)
    relayed = RelayParcels(source.link, Lies, source.describe)
    with pytest.raises(RecoveryFailed, match="seed: other bytes came than it announced"):
        await fetch(missing(4), [relayed], timeout_seconds=60)


async def test_who_does_not_begin_is_left(fleet, mine, monkeypatch):
    """Where an instance goes after it said what it holds, nobody waits for it to the deadline."""
    monkeypatch.setattr(parcel_relay, "BEGIN_SECONDS", 0.2)
    relay = await fleet.relay()
    held = await seed(fleet, relay)

    class Late(GrpcRelayLink):
        """Learns what the seed holds just before it goes."""

        async def manifests_of(self, instance):
            found = await super().manifests_of(instance)
            held.leave()
            await eventually(lambda: relay.holdings.find("seed") is None)
            return found

    source = mine(relay, link=Late)
    with pytest.raises(RecoveryFailed, match=r"seed: it has gone, .* not find it within 0\.2 s"):
        await fetch(missing(4), [source.relay_parcels()], timeout_seconds=600)


async def test_who_has_begun_may_take_longer(fleet, mine, monkeypatch):
    """Only the fair part of the deadline bounds a source that gives."""
    monkeypatch.setattr(parcel_relay, "BEGIN_SECONDS", 1.0)
    relay = await fleet.relay(egress_limit_bytes_per_second=SLOW_BYTES)
    await seed(fleet, relay)
    lost = missing(4, 5)
    found = await fetch(lost, [mine(relay).relay_parcels()], timeout_seconds=60)
    assert relay.transfers.tally().transfers == {"complete": 1}
    assert_right(found, lost)
