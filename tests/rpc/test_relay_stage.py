"""Staging new weights of a serving engine through real relays and the engine's own link."""

import asyncio

import pytest
from cutting import contents
from fakes import (
    PROBE,
    LentMemory,
    Memory,
    attach_message,
    eventually,
    lay_out_bytes,
    random_bytes,
)
from relays import arena_mappings
from test_recut_pull import split

from engine_service.core.ports import FillReport
from engine_service.errors import FillFailed, RelayUnreachable
from engine_service.rpc import relay_link
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.format import Placement
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.pull_report import PathStep, PullOptions
from relay_service.core.record import record
from relay_service.memory import sparse
from relay_service.rpc.servicer import RelayServicer

LAYOUT = lay_out_bytes([5 * BLOCK_BYTES, 2 * BLOCK_BYTES + 100, 30, BLOCK_BYTES])
OLD = random_bytes(LAYOUT)
FROM_NEW = PullOptions(source_instance="new", timeout_seconds=30)
SLOW = PullOptions(source_instance="new", rate_limit_bytes_per_second=1)
FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}


def changed(*blocks: int, seed: int = 9) -> bytes:
    """Returns the old weights with other bytes in some blocks."""
    data = bytearray(OLD)
    other = random_bytes(LAYOUT, seed)
    for index in blocks or range(LAYOUT.block_count):
        block = LAYOUT.block(index)
        data[block.offset : block.offset + block.nbytes] = other[
            block.offset : block.offset + block.nbytes
        ]
    return bytes(data)


class Serving:
    """An engine without torch that serves, and memory that it lends."""

    def __init__(self, relay, memory: Memory, **changes) -> None:
        self.memory = memory
        self.lent = LentMemory(memory.layouts)
        self.link = GrpcRelayLink(relay.address)
        self.changes = {"state": State.READY, **changes}

    async def attach(self) -> None:
        """Attaches; the memory is sealed, as that of whoever serves."""
        self.memory.seal()
        await self.link.attach(self._describe, lambda: self.memory.descriptors)

    async def stage(self, options=FROM_NEW, on_progress=lambda _: None):
        """Has new weights staged."""
        return await self.link.stage(self.lent.by_rank, options, on_progress)

    def _describe(self):
        return attach_message("target", self.memory, **self.changes)

    async def close(self) -> None:
        """Leaves."""
        await self.link.close()
        self.lent.close()
        self.memory.close()


@pytest.fixture
async def serve(fleet):
    """Attaches engines that serve the old weights; checks in the end that they still do."""
    running = []

    async def start(relay, memory: Memory | None = None, **changes) -> Serving:
        serving = Serving(relay, memory or Memory([LAYOUT], [OLD]), **changes)
        running.append((serving, serving.memory.contents()))
        await serving.attach()
        return serving

    yield start
    for serving, before in running:
        assert serving.memory.contents() == before
        await serving.close()


async def source(fleet, relay, data: bytes, name: str = "new"):
    """Attaches an engine that holds the new weights."""
    memory = Memory([LAYOUT], [data])
    weights = Weights("v2", memory.digest, 1)
    return await fleet.engine(relay, name, memory=memory, artifacts=FILES, weights=weights)


async def two_hosts(fleet, data: bytes, **settings):
    """Returns the relays of a source of new weights and of a host that serves old ones."""
    here = await fleet.relay(**settings)
    there = await fleet.relay(join=here.address)
    return here, there, await source(fleet, here, data)


async def landing(relay) -> None:
    """Waits until a pull has landed something."""
    await eventually(lambda: relay.transfers.running)
    puller = relay.transfers.running[0].puller
    await eventually(lambda: puller.blocks_landed)


def assert_given_back(relay) -> None:
    """Checks that nothing of a pull is left, and the instance is announced as before."""
    holding = relay.holdings.get("target")
    assert (holding.lent, relay.transfers.running) == (None, [])
    assert relay.holdings.leases.count() == 0
    assert record(holding, "", 0).weights.version == "v1"


@pytest.mark.parametrize("state", [State.READY, State.PAUSED])
@pytest.mark.parametrize("hosts", [1, 2])
async def test_only_the_block_that_differs_moves(fleet, serve, state, hosts):
    """Of nine blocks the one that changed is sent, and staged beside what goes on serving."""
    here, there, seed = await two_hosts(fleet, changed(6))
    relay = there if hosts == 2 else here
    serving = await serve(relay, state=state)
    progress, mapped = [], arena_mappings()
    report, landed = await serving.stage(on_progress=progress.append)
    assert LAYOUT.block_count == 10
    assert report.bytes_moved == LAYOUT.block(6).nbytes
    assert (report.blocks_reused, report.bytes_reread) == (9, 0)
    assert report.transport == ("tcp" if hosts == 2 else "shm")
    assert (report.weight_version, report.probe) == ("v2", PROBE)
    assert report.source_weights_digest == report.weights_digest == seed.memory.digest
    assert landed == seed.memory.manifests
    assert progress[-1].bytes_verified == progress[-1].bytes_total == LAYOUT.weight_bytes
    block = LAYOUT.block(6)
    assert serving.lent.bytes_at(6) == changed(6)[block.offset : block.offset + block.nbytes]
    assert serving.lent.allocated_blocks == 1
    assert arena_mappings() == mapped
    assert_given_back(relay)


async def test_equal_weights(fleet, serve):
    """When the source holds what serves, no byte moves, and its name for it is reported."""
    _, there, _ = await two_hosts(fleet, OLD)
    serving = await serve(there)
    report, landed = await serving.stage()
    assert (report.bytes_moved, report.blocks_reused) == (0, LAYOUT.block_count)
    assert (report.weight_version, landed) == ("v2", serving.memory.manifests)
    assert serving.lent.allocated_blocks == 0


async def test_all_of_it(fleet, serve):
    """Weights that differ everywhere land whole, and a second time they are taken anew."""
    _, there, seed = await two_hosts(fleet, changed())
    serving = await serve(there)
    for _ in range(2):
        report, landed = await serving.stage()
        assert report.bytes_moved == LAYOUT.weight_bytes
        assert landed == seed.memory.manifests
    last = LAYOUT.block(9)
    assert serving.lent.bytes_at(9) == seed.memory.contents()[last.offset :][: last.nbytes]


async def test_a_source_of_another_placement(fleet, serve):
    """Its weights are cut anew into the lent memory: all of them move, whatever is equal."""
    relay = await fleet.relay()
    old = Memory(*_filled(1, "old"))
    held = Memory(*_filled(2, "new"))
    await fleet.engine(
        relay, "new", memory=held, placement=Placement(2), weights=Weights("v2", held.digest, 1)
    )
    serving = await serve(relay, old, placement=Placement(1))
    right = Memory(*_filled(1, "new"))
    report, landed = await serving.stage()
    assert report.path[-1].recut == "tensor_parallel_size: seed 2, target 1"
    assert report.bytes_moved == sum(one.weight_bytes for one in held.manifests)
    assert landed == right.manifests
    assert report.source_weights_digest == held.digest != report.weights_digest == right.digest
    for block in range(landed[0].block_count):
        at = landed[0].block(block)
        assert serving.lent.bytes_at(block) == right.contents()[at.offset : at.offset + at.nbytes]
    assert_given_back(relay)
    right.close()


def _filled(ranks: int, salt: str):
    holders = split(ranks)
    return [one.manifest for one in holders], [bytes(contents(one, salt)) for one in holders]


async def test_a_source_that_dies(fleet, serve):
    """Another source of these weights goes on where the first one ended."""
    here, there, _ = await two_hosts(fleet, changed(), egress_limit_bytes_per_second=2 << 20)
    serving = await serve(there)
    staging = asyncio.create_task(serving.stage(PullOptions(source_instance="tiny")))
    await landing(there)
    second = await source(fleet, there, changed(), "second")
    await fleet.stop(here)
    report, landed = await staging
    assert [step.source_instance for step in report.path] == ["new", "second"]
    assert report.bytes_moved - report.bytes_reread == LAYOUT.weight_bytes
    assert landed == second.memory.manifests
    assert_given_back(there)


async def test_the_only_source_dies(fleet, serve):
    """Without another source the staging fails, and the memory is given back."""
    here, there, _ = await two_hosts(fleet, changed(), egress_limit_bytes_per_second=2 << 20)
    serving = await serve(there)
    staging = asyncio.create_task(serving.stage())
    await landing(there)
    await fleet.stop(here)
    with pytest.raises(FillFailed, match="no source is left: new"):
        await staging
    assert_given_back(there)


async def test_wrong_bytes(fleet, serve):
    """A source whose bytes are not those of its digests stages nothing, named by tensor."""
    _, there, seed = await two_hosts(fleet, changed(6))
    seed.memory.arenas[0].land(LAYOUT.block(6).offset, b"wrong")
    serving = await serve(there)
    with pytest.raises(FillFailed, match=r"rank 0, tensor w\.1, block 6") as failed:
        await serving.stage()
    assert failed.value.details["status"] == "DATA_LOSS"
    assert_given_back(there)


async def test_an_update_of_the_source(fleet, serve):
    """A source that is updated meanwhile gives its new weights, and none of those before."""
    _, there, seed = await two_hosts(fleet, changed())
    serving = await serve(there)
    slow = PullOptions(source_instance="new", rate_limit_bytes_per_second=1 << 20)
    staging = asyncio.create_task(serving.stage(slow))
    await landing(there)
    await commit(seed, changed(2, seed=10), "v3", 2)
    report, landed = await staging
    assert (report.weight_version, landed) == ("v3", seed.memory.manifests)
    assert [step.reason for step in report.path][1:] == ["complete"]
    assert report.path[-1].bytes_verified == LAYOUT.block(2).nbytes  # the others serve here
    assert_given_back(there)


async def commit(engine, data: bytes, version: str, epoch: int) -> None:
    """Updates a source in place, as its engine does."""
    old = Weights("v2", engine.memory.digest, epoch - 1)
    await engine.update(state=State.UPDATING, weights=old)
    for arena in engine.memory.arenas:
        arena.sequence += 1
    engine.memory.fill([data])
    for arena in engine.memory.arenas:
        arena.sequence += 1
    await engine.update(
        state=State.READY, weights=Weights(version, engine.memory.digest, epoch), probe=PROBE,
        manifests=tuple(engine.memory.manifests),
    )  # fmt: skip


async def test_a_relay_that_is_started_anew(fleet, serve):
    """It has lost the memory: the staging fails, the engine is attached again and can retry."""
    here, there, _ = await two_hosts(fleet, changed())
    serving = await serve(there)
    staging = asyncio.create_task(serving.stage(SLOW))
    await landing(there)
    await fleet.stop(there)
    with pytest.raises((RelayUnreachable, FillFailed)):
        await staging
    again = await fleet.relay(listen=there.address, join=here.address)
    await eventually(lambda: again.holdings.find("target"))
    assert_given_back(again)
    report, _ = await serving.stage()
    assert report.bytes_moved == LAYOUT.weight_bytes


async def test_a_relay_that_has_lost_it_before_the_pull(fleet, serve, monkeypatch):
    """A pull finds no memory when the engine was attached anew meanwhile, and is refused."""
    _, there, _ = await two_hosts(fleet, changed(6))
    serving = await serve(there)
    pull = serving.link.pull

    async def late(*args):
        former = there.holdings.get("target")
        serving.link.detach()
        await eventually(lambda: former.detached and there.holdings.find("target"))
        return await pull(*args)

    monkeypatch.setattr(serving.link, "pull", late)
    with pytest.raises(FillFailed, match="only a dummy can be filled, or memory that"):
        await serving.stage()
    assert_given_back(there)


async def test_a_full_host(fleet, serve, monkeypatch):
    """A host without memory for what differs is told as such, and nothing is staged."""
    _, there, _ = await two_hosts(fleet, changed(6))
    monkeypatch.setattr(sparse, "available_bytes", lambda: 0)
    serving = await serve(there)
    with pytest.raises(FillFailed, match="cannot allocate 1048576 bytes to stage") as failed:
        await serving.stage()
    assert failed.value.details["status"] == "RESOURCE_EXHAUSTED"
    assert_given_back(there)


async def test_a_cancelled_staging(fleet, serve):
    """Whoever leaves has the memory given back before that is over; another one can begin."""
    here, there, _ = await two_hosts(fleet, changed())
    serving = await serve(there)
    mapped = arena_mappings()
    staging = asyncio.create_task(serving.stage(SLOW))
    await landing(there)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    assert_given_back(there)
    await eventually(lambda: here.holdings.leases.count() == 0)
    assert arena_mappings() == mapped
    await serving.stage()


async def test_memory_that_the_relay_refuses(fleet, serve):
    """Memory of another size is refused with the reason; the engine stays attached."""
    _, there, _ = await two_hosts(fleet, changed(6))
    serving = await serve(there)
    small = LentMemory([lay_out_bytes([4096])])
    holding = there.holdings.get("target")
    with pytest.raises(FillFailed, match="takes no memory for new weights: arena holds 8192 bytes"):
        await serving.link.stage(small.by_rank, FROM_NEW, lambda _: None)
    small.close()
    assert there.holdings.get("target") is holding
    await serving.stage()


async def test_a_relay_that_does_not_give_it_back(fleet, serve, monkeypatch):
    """The staged weights are good all the same, and the relay is cut off."""

    async def hang(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(RelayServicer, "ReturnMapping", hang)
    monkeypatch.setattr(relay_link, "RETURN_SECONDS", 0.1)
    _, there, seed = await two_hosts(fleet, changed(6))
    serving = await serve(there)
    former = there.holdings.get("target")
    _, landed = await serving.stage()
    assert landed == seed.memory.manifests
    await eventually(lambda: former.detached and there.holdings.find("target"))
    assert former.lent is None


async def test_a_relay_that_tells_of_other_weights(fleet, serve, monkeypatch):
    """Manifests that are not of what the source announced are not taken for staged."""
    get = RelayServicer.GetManifest

    async def other(self, request, context):
        request.staged = False
        async for page in get(self, request, context):
            yield page

    monkeypatch.setattr(RelayServicer, "GetManifest", other)
    _, there, _ = await two_hosts(fleet, changed(6))
    serving = await serve(there)
    with pytest.raises(FillFailed, match="manifests are not of the weights that it reports"):
        await serving.stage()
    assert_given_back(there)


async def test_its_own_source(fleet, serve):
    """An instance cannot be updated from itself, and without lent memory it is not filled."""
    relay = await fleet.relay()
    serving = await serve(relay)
    with pytest.raises(FillFailed, match="target cannot be its own source"):
        await serving.stage(PullOptions(source_instance="target", timeout_seconds=5))
    with pytest.raises(FillFailed, match="target is READY: only a dummy"):
        await serving.link.pull(FROM_NEW, lambda _: None)


async def test_the_files_of_the_source(fleet, serve):
    """Files come from the instance that the weights came from, as long as it holds those."""
    _, there, seed = await two_hosts(fleet, changed(6))
    serving = await serve(there)
    report, _ = await serving.stage()
    assert await serving.link.source_files(report) == FILES
    await seed.update(
        state=State.READY, weights=Weights("v2", seed.memory.digest, 1),
        artifacts={"tokenizer.json": b"{}"},
    )  # fmt: skip

    async def are_new() -> bool:
        return await serving.link.source_files(report) == {"tokenizer.json": b"{}"}

    await eventually(are_new)  # announced once a second
    gone = FillReport(path=[PathStep("new", "")], source_weights_digest="0" * 32)
    with pytest.raises(FillFailed, match="new has other weights by now, or has gone"):
        await serving.link.source_files(gone)


async def test_files_that_change_with_an_update(fleet, serve):
    """The relay offers what the engine has now; what did not change is not sent again."""
    relay = await fleet.relay()
    serving = await serve(relay, artifacts={"config.json": b"1"})
    holding = relay.holdings.get("target")
    applied = []
    apply = holding.apply
    holding.apply = lambda update: (
        applied.append(update.artifacts and dict(update.artifacts)),
        apply(update),
    )
    await serving.link.update()
    serving.changes["artifacts"]["config.json"] = b"2"
    for _ in range(2):
        await serving.link.update()
    assert applied == [None, {"config.json": b"2"}, None]
    (offered,) = relay.holdings.records("")[0].artifacts
    assert relay.holdings.artifact(offered.sha256) == b"2"


async def test_the_engine_dies_while_it_is_staged(fleet, serve):
    """The pull ends with it, and the memory is let go of."""
    _, there, _ = await two_hosts(fleet, changed())
    serving = await serve(there)
    staging = asyncio.create_task(serving.stage(SLOW))
    await landing(there)
    former = there.holdings.get("target")
    serving.link.detach()
    with pytest.raises(FillFailed, match="the pull into target was ended"):
        await staging
    assert former.lent is None


async def test_other_weights_begin_to_serve_while_it_is_staged(fleet, serve):
    """What lands beside weights that are gone is of no use: the pull ends."""
    _, there, _ = await two_hosts(fleet, changed())
    serving = await serve(there)
    staging = asyncio.create_task(serving.stage(SLOW))
    await landing(there)
    serving.changes["weights"] = Weights("label", serving.memory.digest, 1)
    await serving.link.update()
    assert there.transfers.running
    serving.changes["weights"] = Weights("", "", 2)
    serving.changes["state"] = State.FAILED
    await serving.link.update()
    assert there.transfers.running == []
    with pytest.raises(FillFailed, match="the pull into target was ended"):
        await staging
    assert there.holdings.get("target").lent is None
