"""A fetch that fails, ends or has nobody to ask says why, and leaves nothing behind."""

import asyncio

import pytest
from fakes import eventually, resources
from parcel_scene import (
    NAMES,
    assert_right,
    disk,
    missing,
    nobody,
    parcel_memory,
    pulled,
    seed,
)

from engine_service.core.parcel_relay import RelayParcels
from engine_service.core.parcel_sources import DiskParcels, fetch
from engine_service.errors import CheckpointError, RankDied, RecoveryFailed
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.format import Format


async def test_who_was_asked_and_why_not(fleet, mine):
    """A failure lists everyone: other format, no weights, other versions, and the disk."""
    relay = await fleet.relay()
    await seed(fleet, relay, "half", format=Format((("dtype", "float16"),)))
    await seed(fleet, relay, "older", other=(4, 5))
    await fleet.dummy(relay, "empty")
    folder, _ = disk(other=(4,))
    with pytest.raises(RecoveryFailed) as failed:
        await fetch(missing(4), [mine(relay).relay_parcels(), folder], timeout_seconds=60)
    said = failed.value.message
    for reason in (
        "1 units did not come, of them layer.0.expert.4",
        "half: dtype: seed float16, target bfloat16",
        "empty: it is DUMMY and holds no complete weights",
        "older: it holds none of what is missing, or other versions",
        "disk:/models/tiny: it holds other weights",
    ):
        assert reason in said


@pytest.mark.parametrize(
    ("only", "reason"), [("", "no other instance"), ("gone", "gone: not there")]
)
async def test_nobody_to_ask(fleet, mine, only, reason):
    """It says so, with a relay and without."""
    relay = await fleet.relay()
    await seed(fleet, relay, "mine")  # still announced as it was when it was whole
    source = mine(relay)
    with pytest.raises(RecoveryFailed, match=reason):
        await fetch(missing(4), [source.relay_parcels(only)], timeout_seconds=60)
    alone = RelayParcels(None, GrpcRelayLink, source.describe)
    with pytest.raises(RecoveryFailed, match="relay: not attached to one"):
        await fetch(missing(4), [alone], timeout_seconds=60)
    with pytest.raises(RecoveryFailed, match="nobody was asked"):
        await fetch(missing(4), [], timeout_seconds=60)


async def test_a_relay_that_is_away(fleet, mine):
    """Is named, and the disk gives all."""
    relay = await fleet.relay()
    source = mine(relay)
    await fleet.stop(relay)
    lost = missing(4)
    with pytest.raises(RecoveryFailed, match=f"relay {relay.address}: "):
        await fetch(lost, [source.relay_parcels()], timeout_seconds=60)
    folder, _ = disk()
    found = await fetch(lost, [source.relay_parcels(), folder], timeout_seconds=60)
    assert pulled(found) == {"disk:/models/tiny": [NAMES[4]]}
    assert_right(found, lost)


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_an_end_in_the_middle(fleet, mine, how):
    """Leaves nothing attached, mapped or open, and the source without a reader."""
    relay = await fleet.relay(egress_limit_bytes_per_second=1 << 20)
    await seed(fleet, relay)
    source, before = mine(relay), resources()
    seconds = 2 if how == "deadline" else 600
    running = asyncio.create_task(
        fetch(missing(4, 5, 6, 7), [source.relay_parcels()], timeout_seconds=seconds)
    )
    await eventually(lambda: relay.transfers.running)
    assert parcel_memory() > 0
    if how == "cancelled":
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        with pytest.raises(RecoveryFailed, match=r"seed: not filled within 0\.\d+ s"):
            await running
    await eventually(lambda: parcel_memory() == 0)
    await eventually(lambda: relay.holdings.leases.count() == 0)
    await eventually(lambda: resources().mappings <= before.mappings)


async def test_the_deadline_of_all_sources():
    """Ends whoever takes too long, and says who had been asked by then."""

    async def hanging(*_):
        await asyncio.Event().wait()

    alone = RelayParcels(None, GrpcRelayLink, nobody)
    with pytest.raises(RecoveryFailed, match=r"not within 0\.2 s; relay: not attached to one"):
        await fetch(missing(4), [alone, DiskParcels("none", hanging)], timeout_seconds=0.2)
    assert parcel_memory() == 0


async def test_the_disk_fails():
    """What it says is told; the death of a rank is not taken for a folder that lacks something."""

    def failing(error):
        async def read(*_):
            raise error

        return DiskParcels("/models/tiny", read)

    with pytest.raises(RecoveryFailed, match=r"disk:/models/tiny: no such file"):
        await fetch(missing(4), [failing(CheckpointError("no such file"))])
    with pytest.raises(RankDied):
        await fetch(missing(4), [failing(RankDied("rank 1 died"))])
