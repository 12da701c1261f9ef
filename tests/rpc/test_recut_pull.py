"""Filling targets of another placement through real relays."""

import asyncio

import pytest
from cutting import columns, contents, holder, rows, tensor
from fakes import PROBE, FakeEngine, Memory, eventually

from clients.errors import CallFailed
from relay_service.core.dtypes import DType
from relay_service.core.format import Placement
from relay_service.core.holder import Holder
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest
from relay_service.core.match import Target
from relay_service.core.recut import Landed
from seedrelay.v1 import weights_pb2

HIDDEN, FFN = 1000, 1200
SLOW_BYTES = 8 << 20


def split(ranks: int, sealed: str = "") -> list[Holder]:
    """Cuts a model of some 14 MB over so many ranks."""

    def units(rank: int) -> dict:
        ffn = FFN // ranks
        up = [rows(name, (FFN, HIDDEN), rank * ffn, ffn) for name in ("gate", "up")]
        down = columns("down", (HIDDEN, FFN), rank * ffn, ffn)
        return {
            "up": [tensor("gate_up", *up, dtype=DType.F32)],
            "down": [
                tensor("down", down, dtype=DType.F32, sealed=sealed),
                tensor("norm", rows("norm", (HIDDEN, 1), 0, HIDDEN), dtype=DType.F32),
            ],
        }

    return [holder(f"rank {rank}", units(rank), rank=rank) for rank in range(ranks)]


def memory(ranks: list[Holder], salt: str | None = None) -> Memory:
    """Makes the arenas of an instance, filled unless it is a dummy's."""
    held = [] if salt is None else [bytes(contents(one, salt)) for one in ranks]
    return Memory([one.manifest for one in ranks], held)


async def seed(fleet, relay, name: str, ranks: int, salt: str = "", **changes) -> FakeEngine:
    """Attaches an engine of so many ranks that serves."""
    held = memory(split(ranks), salt)
    return await fleet.engine(relay, name, memory=held, placement=Placement(ranks), **changes)


async def dummy(fleet, relay, name: str, ranks: int) -> FakeEngine:
    """Attaches an engine of so many ranks without weights."""
    held = memory(split(ranks))
    return await fleet.engine(relay, name, memory=held, placement=Placement(ranks))


async def pull(client, name: str = "target", **options) -> list:
    """Pulls to the end and returns every message."""
    return [m async for m in client.pull(name, weights_pb2.PullOptions(**options))]


async def commit(client, target: FakeEngine, report, salt: str = "") -> None:
    """Becomes ready with what landed, as an engine does, and checks it against the model."""
    ranks = split(len(target.memory.layouts))
    assert await client.return_mapping(target.name, "", 10) == len(ranks)
    landed = [await client.manifest(target.name, "", rank) for rank in range(len(ranks))]
    assert weights_digest(landed) == report.weights_digest
    await target.commit(landed, report.weight_version)
    right = memory(ranks, salt)
    assert landed == right.manifests
    for rank, one in enumerate(ranks):
        assert target.memory.contents(rank) == contents(one, salt)
    right.close()


def path(report) -> list[tuple[str, str, str]]:
    """Returns the sources that were tried, why each was left and how it was placed otherwise."""
    return [(s.source_instance, s.reason, s.recut) for s in report.path]


@pytest.mark.parametrize(("held", "wanted"), [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_target_of_another_placement_is_filled_and_seeds(fleet, transport, held, wanted):
    """It is filled, serves as a seed of its own placement, and even fills one like the first."""
    relay = await fleet.relay()
    source = await seed(fleet, relay, "seed", held)
    target = await dummy(fleet, relay, "target", wanted)
    client = fleet.client(relay)
    *_, last = await pull(client, transport=transport)
    report, words = last.report, f"tensor_parallel_size: seed {held}, target {wanted}"
    assert last.probe == PROBE
    assert report.transport == transport
    assert path(report) == [("seed", "complete", words)]
    assert report.bytes_moved == sum(one.weight_bytes for one in source.memory.manifests)
    assert (report.bytes_reread, report.blocks_reused) == (0, 0)
    assert report.source_weights_digest == source.memory.digest != report.weights_digest
    await commit(client, target, report)
    assert relay.holdings.get("target").landed == Landed()
    source.close()
    await eventually(lambda: len(relay.holdings.records("")) == 1)
    for name, ranks, how in (("like", wanted, ""), ("other", held, "tensor_parallel_size: seed")):
        following = await dummy(fleet, relay, name, ranks)
        *_, last = await pull(client, name, source_instance="target")
        assert last.report.path[0].recut.startswith(how)
        assert bool(last.report.path[0].recut) == bool(how)
        await commit(client, following, last.report)
        assert (last.report.weights_digest == report.weights_digest) == (not how)
    assert relay.holdings.leases.count() == 0


async def test_it_is_listed_and_told(fleet):
    """Whoever asks for sources hears what would be cut anew, and a pull says that it does so."""
    relay = await fleet.relay()
    await seed(fleet, relay, "other", 2)
    like = await seed(fleet, relay, "like", 1)
    target = await dummy(fleet, relay, "target", 1)
    client = fleet.client(relay)
    asked = Target("target", relay.holdings.get("target").attach.format, Placement(1))
    words = "tensor_parallel_size: seed 2, target 1"
    found = [(m.instance.instance, m.fits, m.recut) for m in await client.sources(asked)]
    assert found == [("like", True, ""), ("other", True, words)]
    like.close()
    await eventually(lambda: len(relay.holdings.records("")) == 2)
    messages = client.pull("target", weights_pb2.PullOptions(rate_limit_bytes_per_second=1))
    await anext(messages)
    await eventually(lambda: relay.transfers.running[0].puller.report.phase == "transferring")
    (transfer,) = (await client.status()).transfers
    assert transfer.progress.note == f"weights of other are cut anew: {words}"
    await messages.aclose()
    assert not target.memory.digest


@pytest.mark.parametrize(("ranks", "salt"), [(2, ""), (2, "other weights"), (4, ""), (1, "")])
async def test_a_source_that_dies(fleet, ranks, salt):
    """Another one goes on, whatever its placement and weights, and nothing of both is mixed."""
    # Slow where it is sent: what is on the way must not be all of it.
    here = await fleet.relay(egress_limit_bytes_per_second=SLOW_BYTES)
    there = await fleet.relay(join=here.address)
    first = await seed(fleet, here, "first", 2)
    target = await dummy(fleet, there, "target", 1)
    held = memory(split(ranks), salt)
    client = fleet.client(there)
    messages = client.pull("target", weights_pb2.PullOptions())
    await anext(messages)
    await eventually(lambda: there.holdings.get("target").receivers[0].blocks_verified > 0)
    second = await fleet.engine(there, "second", memory=held, placement=Placement(ranks))
    await fleet.stop(here)
    *_, last = [message async for message in messages]
    report = last.report
    assert [name for name, _, _ in path(report)] == ["first", "second"]
    await commit(client, target, report, salt)
    moved, whole = report.bytes_moved, sum(m.weight_bytes for m in second.memory.manifests)
    assert moved - report.bytes_reread == whole
    if ranks != 1:  # a source like the target may lack nothing of what was whole already
        assert (report.bytes_reread == 0) == ((ranks, salt) == (2, ""))
    first.close()


async def test_wrong_bytes_in_a_source(fleet):
    """A block that does not match its digest is named by rank and tensor; another source helps."""
    relay = await fleet.relay()
    bad = await seed(fleet, relay, "a", 2)
    bad.memory.arenas[1].land(1 << 20, b"wrong")
    target = await dummy(fleet, relay, "target", 1)
    client = fleet.client(relay)
    with pytest.raises(CallFailed, match="rank 1, tensor gate_up, block 1") as failed:
        await pull(client)
    assert failed.value.code == "DATA_LOSS"
    assert await client.return_mapping("target", "", 10) == 0
    await seed(fleet, relay, "b", 2)
    *_, last = await pull(client)
    assert [(name, "block 1" in why) for name, why, _ in path(last.report)] == [
        ("a", True), ("b", False),
    ]  # fmt: skip
    assert last.report.bytes_reread > 0
    assert last.report.blocks_reused > 0
    await commit(client, target, last.report)


async def test_an_update_of_the_source(fleet):
    """A source that is updated while it is read fills the target with its new weights, unmixed."""
    relay = await fleet.relay()
    source = await seed(fleet, relay, "seed", 2)
    target = await dummy(fleet, relay, "target", 1)
    client = fleet.client(relay)
    new = [bytes(contents(one, "new")) for one in split(2)]
    slow = weights_pb2.PullOptions(rate_limit_bytes_per_second=SLOW_BYTES)
    messages = client.pull("target", slow)
    await anext(messages)
    await eventually(lambda: relay.holdings.get("target").receivers[0].blocks_verified > 0)
    held = source.memory
    for arena in held.arenas:
        arena.sequence += 1
    await source.update(state=State.UPDATING, weights=Weights("v1", held.digest, 1))
    held.fill(new)
    for arena in held.arenas:
        arena.sequence += 1
    await source.update(
        state=State.READY, weights=Weights("v2", held.digest, 2), probe=PROBE,
        manifests=tuple(held.manifests),
    )  # fmt: skip
    *_, last = [message async for message in messages]
    assert last.report.weight_version == "v2"
    assert len(last.report.path) > 1
    await commit(client, target, last.report, "new")


async def test_what_cannot_be_cut(fleet):
    """A refusal carries the reason and what would help, and no byte has moved."""
    relay = await fleet.relay()
    tiles = "packed in tiles"
    held = memory(split(2, sealed=tiles), "")
    await fleet.engine(relay, "seed", memory=held, placement=Placement(2))
    wanted = memory(split(1, sealed=tiles))
    target = await fleet.engine(relay, "target", memory=wanted, placement=Placement(1))
    with pytest.raises(CallFailed, match=f"down cannot be cut anew: it is {tiles}") as refused:
        await pull(fleet.client(relay))
    error = refused.value
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "FormatMismatch")
    assert "placed like a source" in error.details["hint"]
    assert not any(target.memory.contents())
    assert relay.holdings.leases.count() == 0


async def test_targets_of_every_placement_at_once(fleet):
    """Several targets of several placements are filled from one seed at the same time."""
    relay = await fleet.relay()
    await seed(fleet, relay, "seed", 2)
    targets = [await dummy(fleet, relay, f"target-{n}", n) for n in (1, 2, 3, 4)]
    client = fleet.client(relay)

    async def fill(target: FakeEngine) -> None:
        *_, last = await pull(client, target.name, source_instance="seed")
        await commit(client, target, last.report)

    await asyncio.gather(*map(fill, targets))
    assert relay.holdings.leases.count() == 0
