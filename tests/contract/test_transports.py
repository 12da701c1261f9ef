"""What every way to move blocks must do."""

import asyncio

import pytest
from dataport import LandRank
from fakes import (
    PROBE,
    BytesArena,
    Memory,
    eventually,
    lay_out_bytes,
    random_bytes,
    same_weights,
)

from relay_service.core.attachment import Update
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.rate import TokenBucket
from relay_service.core.reading import Copied
from relay_service.core.receiver import Receiver
from relay_service.errors import CorruptBlock, EpochChanged, NotFound, RelayError, SourceFailed
from relay_service.transports.grpc_stream import GrpcTransport
from relay_service.transports.shm import ShmTransport
from relay_service.transports.tcp import TcpTransport

LONG = lay_out_bytes([40 * BLOCK_BYTES])
"""So long that no buffer on the way holds it all."""
UNLIMITED = TokenBucket()


def shm(relay):
    """Copies within one relay."""
    return ShmTransport(relay.holdings, TokenBucket())


def over_grpc(_relay):
    """Streams from the relay at the source's address."""
    return GrpcTransport()


def tcp(_relay):
    """Reads from the data port of the relay at the source's address."""
    return TcpTransport(GrpcTransport())


@pytest.fixture(params=[shm, tcp, over_grpc], ids=["shm", "tcp", "grpc"])
async def case(request, fleet):
    """One source and one way to it."""
    return Case(fleet, await fleet.relay(), request.param)


class Case:
    """A seed at a relay, a transport, and an arena to fill."""

    def __init__(self, fleet, relay, transport) -> None:
        self.relay = relay
        self.transport = transport(relay)
        self._fleet = fleet

    async def seed(self, layout=None, data=None):
        """Attaches the seed and prepares to fill another arena with its weights."""
        self.layout = layout or self._fleet.layout
        self.data = data or random_bytes(self.layout)
        self.engine = await self._fleet.engine(self.relay, "seed", self.data, layout=self.layout)
        (self.record,) = self.relay.holdings.records(self.relay.address)
        self.arena = BytesArena(self.layout.data_bytes)
        self.receiver = Receiver(self.layout, self.arena)
        self.blocks = list(range(self.layout.block_count))

    async def open(self):
        """Takes a lease and learns what is right."""
        session = await self.transport.open(self.record, "target")
        self.receiver.expect(await session.manifest(0))
        return session

    @property
    def leases(self) -> int:
        """Leases on the seed."""
        return self.relay.holdings.leases.count()


class Gate(TokenBucket):
    """A limit that lets through only what it is told to, and counts."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked = 0
        self.open = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        """Waits at the gate."""
        self.asked += nbytes
        await self.open.wait()


async def test_equal_blocks_cross_once(case):
    """Of blocks that are the same bytes one is read, wherever it is received."""
    await case.seed(lay_out_bytes([BLOCK_BYTES] * 4), data=bytes([7]) * BLOCK_BYTES * 4)
    receiver = Receiver(case.layout, BytesArena(case.layout.data_bytes))
    session = await case.transport.open(case.record, "target")
    way = Copied([await session.manifest(0)], [receiver])
    assert way.missing(0) == [0]
    await session.read(0, way.missing(0), LandRank(way, 0), UNLIMITED)
    assert receiver.complete
    assert (receiver.bytes_moved, receiver.bytes_copied) == (BLOCK_BYTES, 3 * BLOCK_BYTES)
    await session.close()


async def test_every_block_lands(case):
    """All blocks arrive byte for byte, whatever their size, with manifest and probe."""
    await case.seed()
    session = await case.open()
    await session.read(0, case.blocks, case.receiver.land, UNLIMITED)
    assert case.receiver.complete
    assert same_weights(case.layout, bytes(case.arena.data), case.data)
    assert set(case.arena.passes.values()) == {1}
    assert case.receiver.manifest() == case.engine.memory.manifests[0]
    assert await session.probe() == PROBE
    assert case.leases == 1
    await session.close()
    assert case.leases == 0


async def test_only_the_blocks_asked_for(case):
    """A resumed read moves what is missing and nothing else; reading nothing is fine."""
    await case.seed()
    session = await case.open()
    await session.read(0, [5, 2], case.receiver.land, UNLIMITED)
    await session.read(0, [], case.receiver.land, UNLIMITED)
    assert case.receiver.blocks_verified == 2
    assert {case.layout.block(i).offset for i in (2, 5)} == set(case.arena.passes)
    await session.close()


async def test_a_reader_s_limit(case):
    """No more lands than the reader's limit lets through, and all of it is counted."""
    await case.seed(LONG)
    session, gate = await case.open(), Gate()
    reading = asyncio.create_task(session.read(0, case.blocks, case.receiver.land, gate))
    await eventually(lambda: gate.asked)
    for _ in range(100):
        await asyncio.sleep(0)
    assert case.receiver.blocks_verified <= 2
    gate.open.set()
    await reading
    assert case.receiver.complete
    assert gate.asked >= case.layout.weight_bytes
    await session.close()


async def test_reachable_or_not(case, fleet):
    """A way says whether it reaches a source before anything is asked of it."""
    await case.seed()
    assert await case.transport.unusable(case.record) == ""
    await fleet.stop(case.relay)
    assert await case.transport.unusable(case.record) != ""


async def test_a_source_that_has_gone(case):
    """A source that is not there any more cannot be opened, and no lease is left."""
    await case.seed()
    case.engine.leave()
    await eventually(lambda: not case.relay.holdings.records(""))
    with pytest.raises((SourceFailed, NotFound)):
        await case.transport.open(case.record, "target")
    assert case.leases == 0


async def test_a_source_with_other_weights(case):
    """A source that holds other weights than announced cannot be opened."""
    await case.seed()
    weights = Weights("v2", case.engine.memory.digest, 2)
    await case.engine.update(state=State.READY, weights=weights)
    with pytest.raises(RelayError):
        await case.transport.open(case.record, "target")
    assert case.leases == 0


async def test_a_source_that_leaves_while_it_is_read(case):
    """Who holds a lease reads to the end, though the engine has gone."""
    await case.seed()
    session = await case.open()
    case.engine.close()
    await eventually(lambda: not case.relay.holdings.records(""))
    await session.read(0, case.blocks, case.receiver.land, UNLIMITED)
    assert same_weights(case.layout, bytes(case.arena.data), case.data)
    await session.close()


def odd_sequence(case) -> None:
    """Begins to apply a commit."""
    case.engine.memory.arenas[0].sequence += 1


def next_epoch(case) -> None:
    """Has the relay hear of a commit."""
    weights = Weights("v2", case.record.weights.digest, 2)
    case.relay.holdings.get("seed").apply(Update(state=State.READY, weights=weights))


@pytest.mark.parametrize("change", [odd_sequence, next_epoch])
@pytest.mark.parametrize("blocks_before", [0, 3])
async def test_a_source_that_changes(case, change, blocks_before):
    """Reading weights that are, or become, others is `EpochChanged`, whatever landed before."""
    await case.seed(LONG)
    session = await case.open()

    def land(index: int, data: memoryview) -> None:
        case.receiver.land(index, data)
        if case.receiver.blocks_verified == blocks_before:
            change(case)

    if blocks_before == 0:
        change(case)
    with pytest.raises(EpochChanged):
        await session.read(0, case.blocks, land, UNLIMITED)
    assert not case.receiver.complete
    await session.close()
    assert case.leases == 0


async def test_a_landing_error(case):
    """What landing raises is what reading raises; nothing lands after it has returned."""
    await case.seed(LONG)
    session, over, late = await case.open(), False, []

    def land(index: int, data: memoryview) -> None:
        if over:
            late.append(index)
        if case.receiver.blocks_verified >= 3:  # several may land at once
            raise CorruptBlock(0, "w.0", index)
        case.receiver.land(index, data)

    with pytest.raises(CorruptBlock, match=r"tensor w\.0"):
        await session.read(0, case.blocks, land, UNLIMITED)
    over = True
    await session.read(0, [], land, UNLIMITED)
    await session.close()
    assert late == []
    assert case.leases == 0


async def test_a_lease_that_has_ended(case):
    """Without a live lease nothing is read."""
    await case.seed()
    session = await case.open()
    case.relay.holdings.leases.end_all("seed", case.record.generation)
    with pytest.raises(RelayError, match="lease"):
        await session.read(0, case.blocks, case.receiver.land, UNLIMITED)
    assert not case.arena.passes
    await session.close()


@pytest.mark.parametrize("rank", [-1, 1])
async def test_an_unknown_rank(case, rank):
    """A rank that the source does not have is an error, for manifest and blocks alike."""
    await case.seed()
    session = await case.open()
    with pytest.raises(RelayError):
        await session.manifest(rank)
    with pytest.raises(RelayError):
        await session.read(rank, [0], case.receiver.land, UNLIMITED)
    await session.close()
    assert case.leases == 0


@pytest.mark.parametrize("index", [-1, 1 << 40])
async def test_an_unknown_block(case, index):
    """A block that the source does not have is an error."""
    await case.seed()
    session = await case.open()
    with pytest.raises((RelayError, IndexError)):
        await session.read(0, [index], case.receiver.land, UNLIMITED)
    await session.close()


async def test_cancelling_leaves_nothing_writing(case):
    """Once a cancelled read has ended the target's memory can be unmapped at once."""
    await case.seed(LONG)
    target = Memory([LONG])
    receiver = Receiver(LONG, target.arenas[0])
    session = await case.transport.open(case.record, "target")
    receiver.expect(await session.manifest(0))
    limit = TokenBucket(200 * BLOCK_BYTES)
    reading = asyncio.create_task(session.read(0, case.blocks, receiver.land, limit))
    await eventually(lambda: receiver.blocks_verified >= 2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    landed = receiver.bytes_moved
    target.close()
    await session.close()
    await asyncio.sleep(0.02)
    assert receiver.bytes_moved == landed
    assert not receiver.complete
    assert case.leases == 0
