"""Targets that fill one another while they are filled, through real relays on loopback."""

import asyncio

import msgspec
import pytest
from chain_scene import BLOCKS, SLOWLY, lease_on, sources
from fakes import PROBE, eventually

from clients.errors import CallFailed, ClientError
from relay_service.core.instance import FILLING_EPOCH, State
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.errors import NotYet
from relay_service.transports.grpc_stream import GrpcTransport
from seedrelay.v1 import relay_pb2, weights_pb2


async def test_targets_that_start_together(chain):
    """They form a chain by themselves: each is read by one, and the seed gives one copy."""
    names = ["a", "b", "c", "d"]
    await chain.start(*names, egress_limit_bytes_per_second=SLOWLY)
    done = await asyncio.gather(*(chain.pull(name) for name in names))
    read = [sources(last)[-1] for last in done]
    assert len(set(read)) == len(names), read
    for name, last in zip(names, done, strict=True):
        chain.assert_filled(name)
        assert last.probe == PROBE
        assert last.report.weights_digest == chain.seed.memory.digest
        assert (last.report.weight_version, last.report.bytes_reread) == ("v1", 0)
    served = sum(chain.directory.holdings.leases.bytes_served.values())
    assert served == chain.fleet.layout.weight_bytes


async def test_an_incomplete_middle_is_read(chain):
    """The last one has blocks while the middle one lacks some; both end with the seed's weights."""
    await chain.start("middle", "last", egress_limit_bytes_per_second=SLOWLY)
    first = chain.pull("middle")
    await chain.filling("middle")
    second = chain.pull("last")
    await chain.filling("last")
    assert chain.verified("last") <= chain.verified("middle") < BLOCKS
    assert sources(await second) == ["middle"]
    assert sources(await first) == ["seed"]
    chain.assert_filled("last")


async def test_a_gap_in_a_chain_is_closed(chain):
    """When a middle one goes, its reader takes its place; the reader of that one reads on."""
    await chain.start("a", "b", "c", egress_limit_bytes_per_second=SLOWLY)
    pulls = {}
    for name in ("a", "b", "c"):
        pulls[name] = chain.pull(name)
        await chain.filling(name)
    epoch = chain.holding("b").offered.now.epoch
    pulls["a"].cancel()
    await asyncio.gather(pulls["a"], return_exceptions=True)
    await chain.fleet.stop(chain.relays["a"])
    await eventually(lambda: chain.holding("b").offered.now.upstream == ("seed",))
    assert chain.holding("b").offered.now.epoch == epoch
    assert sources(await pulls["b"]) == ["a", "seed"]
    assert sources(await pulls["c"]) == ["b"]
    chain.assert_filled("b")
    chain.assert_filled("c")


async def test_a_manifest_from_an_incomplete_one(chain):
    """It passes the manifest on that it is filled with; what waits for one in vain hears so."""
    await chain.start("a", "b", egress_limit_bytes_per_second=SLOWLY)
    chain.pull("a")
    await chain.filling("a")
    manifest = chain.seed.memory.manifests[0]
    client = chain.fleet.client(chain.relays["a"])
    assert await client.manifest("a", "", 0, epoch=FILLING_EPOCH) == manifest
    seed = chain.fleet.client(chain.directory)
    assert await seed.manifest("seed", "", 0, epoch=FILLING_EPOCH) == manifest
    with pytest.raises(CallFailed, match="has not arrived"):
        await chain.fleet.client(chain.relays["b"]).manifest("b", "", 0, epoch=FILLING_EPOCH)


async def test_a_manifest_of_who_has_gone(chain):
    """Where nobody answers who was said to have the manifest, the source is asked."""
    await chain.start("a")
    await chain.fleet.stop(chain.relays["a"])
    (seed,) = chain.directory.holdings.records(chain.directory.address)
    session = await GrpcTransport().open(seed, "reader")
    gone = msgspec.structs.replace(seed, address=chain.relays["a"].address)
    assert await session.manifest(0, gone) == chain.seed.memory.manifests[0]
    await session.close()


async def test_a_reader_does_not_notice_the_commit(chain):
    """Who reads from a target that becomes ready reads on under the same lease."""
    await chain.start("middle", "last", egress_limit_bytes_per_second=SLOWLY)
    first = chain.pull("middle")
    await chain.filling("middle")
    second = chain.pull("last", rate_limit_bytes_per_second=SLOWLY // 2)
    await chain.commit("middle", await first)
    assert chain.holding("middle").state is State.READY
    assert chain.verified("last") < BLOCKS
    last = await second
    assert [s.reason for s in last.report.path if s.source_instance == "middle"] == ["complete"]
    chain.assert_filled("last")


async def test_half_filled_is_not_ready(chain):
    """An instance that lends what it has is listed as incomplete, with what it's filled with."""
    await chain.start("middle", "last")
    chain.pull("middle", rate_limit_bytes_per_second=SLOWLY)
    await chain.filling("middle")
    client = chain.fleet.client(chain.relays["last"])
    (shown,) = [i for i in (await client.status()).instances if i.instance == "middle"]
    assert shown.state == weights_pb2.INSTANCE_STATE_DUMMY
    assert (shown.weights_digest, shown.epoch) == ("", 0)
    assert shown.filling.weights_digest == chain.seed.memory.digest
    assert shown.filling.source_instance == "seed"
    assert shown.ranks[0].have_blocks < shown.ranks[0].blocks


def read_blocks(client, lease: str, *blocks: int):
    """Reads blocks as any client would."""
    return client.channel.unary_stream(
        "/seedrelay.v1.BlockService/ReadBlocks",
        request_serializer=relay_pb2.ReadBlocksRequest.SerializeToString,
        response_deserializer=relay_pb2.ReadBlocksResponse.FromString,
    )(relay_pb2.ReadBlocksRequest(lease=lease, rank=0, blocks=blocks))


async def test_not_yet(chain):
    """A block that is there comes; one that isn't is waited for, then refused by its own name."""
    await chain.start("middle")
    chain.pull("middle", rate_limit_bytes_per_second=1)
    await chain.filling("middle")
    client, granted = await lease_on(chain, "middle")
    assert granted.epoch > FILLING_EPOCH
    assert list(granted.upstream_instances) == ["seed"]
    got = await read_blocks(client, granted.lease, 0).read()
    assert got.data == chain.fleet.data[:BLOCK_BYTES]
    with pytest.raises(Exception, match="has not arrived yet") as failed:
        await read_blocks(client, granted.lease, BLOCKS - 1).read()
    error = ClientError.of(failed.value, "")
    assert (error.code, error.reason) == ("UNAVAILABLE", "NotYet")


async def test_no_unverified_block_is_read(chain):
    """Bytes that lie there without having been verified are never given away."""
    await chain.start("middle")
    chain.pull("middle", rate_limit_bytes_per_second=1)
    await chain.filling("middle")
    held = chain.holding("middle")
    epoch, index = held.offered.now.epoch, BLOCKS - 1
    block = chain.fleet.layout.block(index)
    right = chain.fleet.data[block.offset : block.offset + block.nbytes]
    chain.targets["middle"].memory.arenas[0].land(block.offset, right)
    for named in (index, -1):
        with pytest.raises(NotYet), held.reading(0, epoch, named):
            pytest.fail("it was lent")
    assert held.offered.there(0, 0, epoch, 4) == 1, "a run ends where the next block is to come"
    with pytest.raises(NotYet, match="block 1 of"), held.reading(0, epoch, 0, 2):
        pytest.fail("it was lent")
    receiver = held.receivers[0]
    with pytest.raises(NotYet), held.reading(0, epoch, 0):
        receiver.verified[0] = b""  # it was found wrong while it was read


async def test_upstream_is_refused(chain):
    """Nobody reads from a target that is filled from it, directly or through another one."""
    await chain.start("middle", "last", egress_limit_bytes_per_second=SLOWLY)
    pulls = [chain.pull("middle")]
    await chain.filling("middle")
    pulls.append(chain.pull("last"))
    await chain.filling("last")
    for holder in ("seed", "middle", "last"):
        with pytest.raises(CallFailed, match="is filled from") as refused:
            await lease_on(chain, "last", holder)
        assert (refused.value.code, refused.value.reason) == (
            "FAILED_PRECONDITION", "ReadsFromReader",
        )  # fmt: skip
    await asyncio.gather(*pulls)


async def test_the_source_dies(chain):
    """The head of a chain goes on at another seed, and its readers lose nothing."""
    await chain.start("middle", "last", egress_limit_bytes_per_second=SLOWLY)
    first = chain.pull("middle")
    await chain.filling("middle")
    second = chain.pull("last")
    await chain.filling("last")
    await chain.fleet.seed(chain.relays["last"], "spare")
    await eventually(lambda: any(i.instance == "spare" for i in chain.known()))
    chain.seed.close()
    chain.directory.holdings.leases.end_all("seed", "life of seed")
    done = await first
    assert sources(done) == ["seed", "spare"]
    assert done.report.bytes_reread <= 4 * BLOCK_BYTES
    await second
    chain.assert_filled("middle")
    chain.assert_filled("last")


async def test_the_middle_dies(chain):
    """Readers of a target that dies go to the seed, and keep what they have verified."""
    await chain.start("middle", "last", egress_limit_bytes_per_second=SLOWLY)
    first = chain.pull("middle")
    await chain.filling("middle")
    second = chain.pull("last")
    await chain.filling("last", 4)
    kept = chain.verified("last")
    chain.targets["middle"].leave()
    with pytest.raises(CallFailed):
        await first
    done = await second
    assert sources(done)[0] == "middle"
    assert sources(done)[-1] == "seed"
    step = done.report.path[-1]
    assert step.bytes_verified <= chain.fleet.layout.weight_bytes - kept * BLOCK_BYTES
    chain.assert_filled("last")


async def test_two_on_one_host(chain):
    """Only one of them reads over the network; the other one copies what has landed beside it."""
    await chain.start("a", egress_limit_bytes_per_second=SLOWLY)
    chain.relays["b"] = chain.relays["a"]
    chain.targets["b"] = await chain.fleet.dummy(chain.relays["a"], "b")
    first = chain.pull("a")
    await chain.filling("a")
    done = await chain.pull("b")
    await first
    assert [(s.source_instance, s.transport) for s in done.report.path] == [("a", "shm")]
    chain.assert_filled("b")
    assert sum(chain.directory.holdings.leases.bytes_served.values()) == BLOCKS * BLOCK_BYTES
