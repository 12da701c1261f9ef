"""What nobody here holds, fetched through real relays from other instances, or from the disk."""

import pytest
from parcel_scene import NAMES, assert_right, disk, missing, nobody, pulled, seed

from engine_service.core.parcel_sources import DiskParcels, fetch


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
async def test_from_an_instance_with_another_map(fleet, mine, hosts, parts):
    """Just the missing units cross, whatever rank and slot they lie in over there, each once."""
    there = await fleet.relay()
    here = await fleet.relay(join=there.address) if hosts == 2 else there
    groups = ((7, 1), (0, 5), (2, 6), (4, 3))
    await seed(fleet, there, groups=groups, parts=parts)
    lost, progress = missing(4, 6, 7, parts=parts), []
    sources = [mine(here, parts=parts).relay_parcels(), DiskParcels("none", nobody)]
    found = await fetch(lost, sources, progress.append, timeout_seconds=60)
    nbytes = sum(one.unit.nbytes for one in lost)
    tally = here.transfers.tally()
    assert sum(tally.bytes_received.values()) == nbytes
    assert sum(one.nbytes for one in found.pulled) == nbytes
    assert pulled(found) == {"relay:seed": sorted([NAMES[4], NAMES[6], NAMES[7]] * parts)}
    assert {(one.phase, one.source, one.bytes_total) for one in progress} == {
        ("pulling", "seed", nbytes)
    }
    assert max(one.bytes_done for one in progress) <= nbytes
    assert_right(found, lost)


async def test_from_an_instance_that_is_placed_alike(fleet, mine):
    """A parcel is placed like nobody: no rank of a source is taken for its own number."""
    relay = await fleet.relay()
    source = mine(relay)
    await seed(fleet, relay, placement=source.placement)
    lost = missing(4, 5)
    found = await fetch(lost, [source.relay_parcels()], timeout_seconds=60)
    assert pulled(found) == {"relay:seed": [NAMES[4], NAMES[5]]}
    assert_right(found, lost)


async def test_one_part_alone(fleet, mine):
    """Where the other ranks of a group can still give, only the part that cannot is fetched."""
    relay = await fleet.relay()
    await seed(fleet, relay, parts=2)
    lost = missing(4, 5, parts=2, of_parts=(1,))
    found = await fetch(lost, [mine(relay, parts=2).relay_parcels()], timeout_seconds=60)
    assert {(one.part, one.unit) for one in found.pulled} == {(1, NAMES[4]), (1, NAMES[5])}
    assert sum(relay.transfers.tally().bytes_received.values()) == sum(u.nbytes for _, u in lost)
    assert_right(found, lost)


async def test_several_instances_each_with_a_part(fleet, mine):
    """Who has most comes first; an instance of another version counts by what is equal in it."""
    relay = await fleet.relay()
    await seed(fleet, relay, "a", other=(5, 6))
    await seed(fleet, relay, "b", other=(6,))
    await seed(fleet, relay, "c", other=(4, 5))
    lost = missing(4, 5, 6)
    found = await fetch(lost, [mine(relay).relay_parcels()], timeout_seconds=60)
    assert pulled(found) == {"relay:b": [NAMES[4], NAMES[5]], "relay:c": [NAMES[6]]}
    assert sum(relay.transfers.tally().bytes_received.values()) == sum(u.nbytes for _, u in lost)
    assert_right(found, lost)


async def test_what_no_instance_has_comes_from_the_disk(fleet, mine):
    """And only that: the disk is asked for what is left, part by part."""
    relay = await fleet.relay()
    await seed(fleet, relay, parts=2, other=(4,))
    lost, progress = missing(4, 5, parts=2), []
    folder, asked = disk(parts=2)
    found = await fetch(
        lost, [mine(relay, parts=2).relay_parcels(), folder], progress.append, timeout_seconds=60
    )
    assert pulled(found) == {
        "relay:seed": [NAMES[5]] * 2, "disk:/models/tiny": [NAMES[4]] * 2,
    }  # fmt: skip
    assert sorted(asked) == [(0, [NAMES[4]]), (1, [NAMES[4]])]
    assert [(one.phase, one.source) for one in progress[-1:]] == [("reading", "/models/tiny")]
    assert_right(found, lost)


async def test_the_source_that_is_named(fleet, mine):
    """Is the only one."""
    relay = await fleet.relay()
    for name in ("a", "b", "c"):
        await seed(fleet, relay, name)
    lost = missing(4)
    found = await fetch(lost, [mine(relay).relay_parcels("b")], timeout_seconds=60)
    assert pulled(found) == {"relay:b": [NAMES[4]]}
    assert_right(found, lost)


async def test_nothing_is_missing():
    """Nobody is asked."""
    found = await fetch([], [DiskParcels("none", nobody)])
    assert found == ((), ())
