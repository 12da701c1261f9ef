"""An instance of a layer with experts that has lost some, and others that hold them. No torch."""

import os
from functools import cache
from pathlib import Path

import pytest
from cutting import contents, holder, rows, tensor
from fakes import Memory, attach_message, eventually, verified

from engine_service.core.parcel import NAME
from engine_service.core.parcel_relay import PARCEL, RelayParcels
from engine_service.core.parcel_sources import DiskParcels
from engine_service.core.recovery_plan import Missing
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.dtypes import DType
from relay_service.core.format import Placement
from relay_service.core.holder import Holder
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import HEADER_BYTES, Manifest

ROWS, COLUMNS = 600, 1000
"""Of a float32 matrix of an expert, of which a rank holds half the rows with two parts."""
LINEAR = ((0, 1, 2, 3), (4, 5, 6, 7))
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
    placed = {"placement": Placement(parts, len(groups), 0, f"map of {name}")}
    return await fleet.engine(relay, name, memory=memory, **placed | changes)


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
        await eventually(lambda r=relay: r.holdings.find("mine" + PARCEL) is None)
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
