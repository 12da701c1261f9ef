"""What nobody here holds, fetched through real relays from other instances, or from the disk."""

import asyncio
import os
from functools import cache
from pathlib import Path

import pytest
from cutting import contents, holder, rows, tensor
from fakes import Memory, attach_message, eventually, resources, verified

from engine_service.core import parcel_relay
from engine_service.core.parcel import NAME
from engine_service.core.parcel_relay import RelayParcels
from engine_service.core.parcel_sources import DiskParcels, fetch
from engine_service.core.recovery_plan import Missing
from engine_service.errors import CheckpointError, RankDied, RecoveryFailed
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.dtypes import DType
from relay_service.core.format import Format, Placement
from relay_service.core.holder import Holder
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import BLOCK_BYTES, HEADER_BYTES, Manifest

ROWS, COLUMNS = 600, 1000
"""Of a float32 matrix of an expert, of which a rank holds half the rows with two parts."""
LINEAR = ((0, 1, 2, 3), (4, 5, 6, 7))
SLOW_BYTES = 4 << 20
NAMES = {expert: f"layer.0.expert.{expert}" for expert in range(8)}


def split(groups, parts: int = 1) -> list[Holder]:
    """Lays out a layer of 8 experts: each rank its part of its group's, and of what all hold."""

    def units(held: tuple[int, ...], part: int) -> dict:
        count = ROWS // parts
        each = {
            NAMES[expert]: [
                tensor(f"{expert}.{name}", rows(f"{expert}.{name}", whole, part * count, count),
                       dtype=DType.F32)
                for name, whole in (("up", (ROWS, COLUMNS)), ("down", (ROWS, 7)))
            ]
            for expert in held
        }  # fmt: skip
        dense = rows("dense", (ROWS, 1), part * count, count)
        return {"layer.0.dense": [tensor("dense", dense, dtype=DType.F32)], **each}

    return [
        holder(f"rank {group * parts + part}", units(held, part), rank=group * parts + part)
        for group, held in enumerate(groups)
        for part in range(parts)
    ]


@cache
def filled(groups=LINEAR, parts: int = 1, other: tuple[int, ...] = ()) -> list[bytes]:
    """Returns what ranks hold; some experts of another version."""
    each = []
    for one in split(groups, parts):
        data, old = contents(one), contents(one, "other")
        for unit in one.manifest.units:
            if unit.name in {NAMES[expert] for expert in other}:
                data[unit.offset : unit.offset + unit.nbytes] = old[
                    unit.offset : unit.offset + unit.nbytes
                ]
        each.append(bytes(data))
    return each


async def seed(fleet, relay, name="seed", groups=LINEAR, parts=1, other=(), **changes):
    """Attaches an instance that serves; some experts of another version."""
    ranks = split(groups, parts)
    memory = Memory([one.manifest for one in ranks], filled(groups, parts, other))
    placement = Placement(parts, len(groups), 0, f"map of {name}")
    return await fleet.engine(relay, name, memory=memory, placement=placement, **changes)


def missing(*experts: int, parts: int = 1, of_parts: tuple[int, ...] = ()) -> list[Missing]:
    """Returns experts that were lost, as the instance held them when it was whole."""
    ranks = split(LINEAR, parts)
    known = [verified(o.manifest, d) for o, d in zip(ranks, filled(LINEAR, parts), strict=True)]
    return [
        Missing(rank % parts, unit)
        for rank, manifest in enumerate(known)
        if not of_parts or rank % parts in of_parts
        for unit in manifest.units
        if unit.name in {NAMES[expert] for expert in experts}
    ]


def pulled(found) -> dict[str, list[str]]:
    """Returns what came from whom."""
    by: dict[str, list[str]] = {}
    for one in found.pulled:
        by.setdefault(one.source, []).append(one.unit)
    return {source: sorted(names) for source, names in by.items()}


def assert_right(found, lost: list[Missing]) -> None:
    """Checks that parcels hold just what was missing, byte by byte, and closes them."""
    there = {}
    for parcel in found.parcels:
        for unit in parcel.manifest.units:
            data = os.pread(parcel.fd, unit.nbytes, HEADER_BYTES + unit.offset)
            there[parcel.part, unit.name] = data
    assert there.keys() == {(one.part, one.unit.name) for one in lost}
    assert sum(map(len, there.values())) == sum(one.unit.nbytes for one in lost)
    parts = max(one.part for one in lost) + 1
    ranks = split(LINEAR, parts)
    for rank, (one, data) in enumerate(zip(ranks, filled(LINEAR, parts), strict=True)):
        for unit in one.manifest.units:
            if (key := (rank % parts, unit.name)) in there:
                assert there[key] == data[unit.offset : unit.offset + unit.nbytes]
    found.close()


class Mine:
    """An instance that has lost ranks: its description, its link, and the source through it."""

    def __init__(self, relay, parts: int = 1, link=GrpcRelayLink) -> None:
        ranks = split(LINEAR, parts)
        self.memory = Memory([one.manifest for one in ranks], filled(LINEAR, parts))
        self.placement = Placement(parts, 2, 0, "map of mine")
        self.link = link(relay.address)

    def relay_parcels(self, only: str = "") -> RelayParcels:
        """Returns the source."""
        return RelayParcels(self.link, GrpcRelayLink, self.describe, only)

    def describe(self):
        """Describes the instance."""
        return attach_message("mine", self.memory, placement=self.placement)

    async def close(self) -> None:
        """Lets go of everything."""
        await self.link.close()
        self.memory.close()


@pytest.fixture
async def mine(fleet):
    """Makes instances that recover; checks in the end that no parcel is left anywhere."""
    made: list[tuple[Mine, object]] = []

    def start(relay, **changes) -> Mine:
        made.append((Mine(relay, **changes), relay))
        return made[-1][0]

    yield start
    assert parcel_memory() == 0
    for one, relay in made:
        await eventually(lambda r=relay: r.holdings.find("mine" + parcel_relay.PARCEL) is None)
        assert relay.transfers.running == []
        await one.close()


def nobody(*_):
    """Stands for a disk that nobody may ask."""
    raise AssertionError("the disk was asked")


def disk(parts: int = 1, other: tuple[int, ...] = ()):
    """Returns what reads units of a folder into memory, as a rank does."""
    asked: list[tuple[int, list[str]]] = []

    async def read(part: int, manifest: Manifest, fd: int) -> Manifest:
        asked.append((part, [unit.name for unit in manifest.units]))
        ranks = split(LINEAR, parts)
        for rank, (one, data) in enumerate(zip(ranks, filled(LINEAR, parts, other), strict=True)):
            held = {unit.name: unit for unit in one.manifest.units} if rank % parts == part else {}
            for unit in manifest.units:
                if source := held.get(unit.name):
                    there = data[source.offset : source.offset + source.nbytes]
                    os.pwrite(fd, there, HEADER_BYTES + unit.offset)
        return manifest

    return DiskParcels("/models/tiny", read), asked


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
    await seed(fleet, relay, "first", other=(4,))
    await seed(fleet, relay, "second", other=(5, 6, 7))
    lost = missing(4, 5, 6)
    found = await fetch(lost, [mine(relay).relay_parcels()], timeout_seconds=60)
    assert pulled(found) == {"relay:first": [NAMES[5], NAMES[6]], "relay:second": [NAMES[4]]}
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


async def test_a_source_with_wrong_bytes(fleet, mine):
    """Its unit comes from another one; what it gave rightly stays."""
    relay = await fleet.relay()
    bad = await seed(fleet, relay, "a")
    units = {unit.name: unit for unit in bad.memory.manifests[1].units}
    bad.memory.arenas[1].land(units[NAMES[5]].offset + BLOCK_BYTES, b"wrong")
    lost = missing(4, 5)
    source = mine(relay)
    with pytest.raises(RecoveryFailed, match=r"expert\.5: a: .*rank 1, tensor 5\.up, block"):
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
    whole = lost[0].unit.nbytes
    await eventually(lambda: here.transfers.running[0].puller.bytes_verified >= whole)
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
    whole = lost[0].unit.nbytes
    await eventually(lambda: relay.transfers.running[0].puller.bytes_verified >= whole)
    await update(held, other=(4, 5, 6))
    found = await running
    came = pulled(found)
    assert NAMES[7] in came["relay:seed"]
    assert [(0, came["disk:/models/tiny"])] == asked
    assert_right(found, lost)


async def update(engine, other) -> None:
    """Commits other versions of some experts, as an engine does."""
    held = engine.memory
    for arena in held.arenas:
        arena.sequence += 1
    await engine.update(state=State.UPDATING, weights=Weights("v1", held.digest, 1))
    held.fill(filled(other=other))
    for arena in held.arenas:
        arena.sequence += 1
    weights = Weights("v2", held.digest, 2)
    await engine.update(state=State.READY, weights=weights, manifests=tuple(held.manifests))


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
    source = mine(await fleet.relay())
    with pytest.raises(RecoveryFailed, match=reason):
        await fetch(missing(4), [source.relay_parcels(only)], timeout_seconds=60)
    alone = RelayParcels(None, GrpcRelayLink, source.describe)
    with pytest.raises(RecoveryFailed, match="relay: not attached to one"):
        await fetch(missing(4), [alone], timeout_seconds=60)
    with pytest.raises(RecoveryFailed, match="nobody was asked"):
        await fetch(missing(4), [], timeout_seconds=60)


async def test_the_source_that_is_named(fleet, mine):
    """Is the only one."""
    relay = await fleet.relay()
    for name in ("a", "b", "c"):
        await seed(fleet, relay, name)
    lost = missing(4)
    found = await fetch(lost, [mine(relay).relay_parcels("b")], timeout_seconds=60)
    assert pulled(found) == {"relay:b": [NAMES[4]]}
    assert_right(found, lost)


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


def parcel_memory() -> int:
    """Returns how many descriptors and mappings of parcels this process has."""
    mapped = Path("/proc/self/maps").read_text().count(NAME)
    return mapped + sum(NAME in link_of(fd) for fd in Path("/proc/self/fd").iterdir())


def link_of(fd: Path) -> str:
    """Returns what a descriptor of this process is open on."""
    try:
        return str(fd.readlink())
    except FileNotFoundError:
        return ""


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


async def test_nothing_is_missing():
    """Nobody is asked."""
    found = await fetch([], [DiskParcels("none", nobody)])
    assert found == ((), ())
