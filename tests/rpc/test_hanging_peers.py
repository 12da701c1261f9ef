"""Peers that hang hold nobody up beyond a bound, and leave nothing behind."""

import asyncio
import gc
import socket
from pathlib import Path

import pytest
from fakes import (
    Memory,
    attach_message,
    eventually,
    lay_out_bytes,
    random_bytes,
    same_weights,
)

from clients.errors import CallFailed, DeadlineExceeded, Unreachable
from engine_service.errors import RelayUnreachable
from engine_service.rpc import relay_link
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.instance import State
from relay_service.core.pull_report import PullOptions
from relay_service.core.record import record
from relay_service.rpc import directory_link
from relay_service.rpc.servicer import RelayServicer
from relay_service.transports import grpc_stream
from relay_service.transports.grpc_stream import BlockServicer
from seedrelay.v1 import relay_pb2, weights_pb2

IN_TIME_SECONDS = 5
"""Half of what a call waits for that has no bound of its own."""


async def _hang(*_) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def mute():
    """The address of somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def pull(client, **options):
    """Pulls to the end."""
    return [m async for m in client.pull("target", weights_pb2.PullOptions(**options))]


async def two_hosts(fleet):
    """Returns a relay with a seed, and another one with a dummy."""
    here = await fleet.relay()
    there = await fleet.relay(join=here.address)
    await fleet.seed(here)
    await fleet.dummy(there)
    return here, there


async def test_a_directory_that_hangs(fleet, mute, monkeypatch):
    """A relay whose directory hangs lists what it knows, says so, and ends when it is told to."""
    monkeypatch.setattr(directory_link, "DIRECTORY_SECONDS", 0.2)
    relay = await fleet.relay(join=mute)
    await fleet.dummy(relay)
    client = fleet.client(relay)
    async with asyncio.timeout(IN_TIME_SECONDS):
        assert [one.instance for one in (await client.status()).instances] == ["target"]
        with pytest.raises(DeadlineExceeded, match=f"directory {mute} does not answer"):
            await pull(client, timeout={"nanos": 500_000_000})
        await fleet.stop(relay)


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
async def test_a_deadline_does_not_wait_for_a_source_that_hangs(fleet, monkeypatch, transport):
    """A pull ends at its deadline although its source does not take the lease back."""
    monkeypatch.setattr(RelayServicer, "ReleaseLease", _hang)
    monkeypatch.setattr(grpc_stream, "RELEASE_SECONDS", 0.2)
    here, there = await two_hosts(fleet)
    async with asyncio.timeout(IN_TIME_SECONDS):
        with pytest.raises(DeadlineExceeded, match=rf"seed \({transport}\): not done"):
            await pull(
                fleet.client(there),
                transport=transport,
                timeout={"seconds": 1},
                rate_limit_bytes_per_second=1,
            )
    assert there.transfers.running == []
    assert here.holdings.leases.count() == 1


async def test_a_source_that_hangs_keeps_no_connection(fleet, monkeypatch):
    """A source that stops sending is left, and its connection closed without any collector."""
    fleet.layout = lay_out_bytes([30 << 20])
    fleet.data = random_bytes(fleet.layout)
    monkeypatch.setattr(grpc_stream, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(BlockServicer, "_read_blocks", _three_blocks(BlockServicer._read_blocks))
    _, there = await two_hosts(fleet)
    client = fleet.client(there)
    await client.status()
    before = _sockets()
    gc.disable()
    try:
        with pytest.raises(CallFailed, match=r"no block for 0\.3 s"):
            await pull(client, transport="grpc")
        await eventually(lambda: _sockets() == before)
    finally:
        gc.enable()


async def test_a_pull_that_is_ended_twice(fleet, monkeypatch):
    """A pull whose caller and whose engine leave at once still gives its lease back."""
    asked, go, release = asyncio.Event(), asyncio.Event(), RelayServicer.ReleaseLease

    async def slow(*call) -> relay_pb2.ReleaseLeaseResponse:
        asked.set()
        await go.wait()
        return await release(*call)

    monkeypatch.setattr(RelayServicer, "ReleaseLease", slow)
    here, there = await two_hosts(fleet)
    target = there.holdings.get("target")
    there.transfers.start(target, PullOptions(rate_limit_bytes_per_second=1))
    await eventually(lambda: target.receivers[0].blocks_verified > 0)
    ending = [asyncio.create_task(there.transfers.end(target))]
    await asked.wait()
    ending.append(asyncio.create_task(there.transfers.end(target)))
    assert not (await asyncio.wait(ending, timeout=0.2))[0]
    go.set()
    await asyncio.gather(*ending)
    assert here.holdings.leases.count() == 0


async def test_a_reader_that_broke_off(fleet):
    """The lease of a reader that vanished ends soon, one that comes back keeps it."""
    here, _ = await two_hosts(fleet)
    seed = here.holdings.get("seed")
    client = fleet.client(here)
    lease = (await client.acquire_lease(record(seed, here.address, 0), "target")).lease
    request = relay_pb2.ReadBlocksRequest(lease=lease, rank=0, blocks=[0] * 10_000)
    call = client.channel.unary_stream(
        "/seedrelay.v1.BlockService/ReadBlocks",
        request_serializer=relay_pb2.ReadBlocksRequest.SerializeToString,
    )(request)
    await call.read()
    held = here.holdings.leases.use(lease)
    long = held.expires_at
    call.cancel()
    await eventually(lambda: held.expires_at < long)
    assert here.holdings.leases.use(lease).expires_at > long


async def _link(fleet, relay) -> GrpcRelayLink:
    """Attaches a dummy through the engine's own link."""
    engine = fleet.unattached("target")
    link = GrpcRelayLink(relay.address)
    await link.attach(
        lambda: attach_message("target", engine.memory), lambda: engine.memory.descriptors
    )
    return link


async def test_memory_that_a_relay_was_cut_off_from(fleet):
    """An engine that moved its arena away from a relay attaches anew with what it has now."""
    relay = await fleet.relay()
    arenas = [Memory([fleet.layout]), Memory([fleet.layout], [fleet.data])]
    link = GrpcRelayLink(relay.address)
    await link.attach(lambda: attach_message("target", arenas[0]), lambda: arenas[0].descriptors)
    arenas.pop(0).close()
    link.detach()
    await eventually(lambda: (held := relay.holdings.find("target")) and held.state is State.READY)
    with relay.holdings.get("target").reading(0, 1) as arena:
        assert same_weights(fleet.layout, bytes(arena.view(0, arena.data_bytes)), fleet.data)
    await link.close()
    arenas.pop().close()


async def test_a_relay_that_falls_silent(fleet, monkeypatch):
    """An engine leaves a relay that does not say how its pull goes, and attaches anew."""

    async def say_once(self, request, context):
        yield relay_pb2.PullResponse(
            progress=weights_pb2.PullProgress(source_instance="seed", transport="shm")
        )
        await _hang()

    monkeypatch.setattr(RelayServicer, "Pull", say_once)
    monkeypatch.setattr(relay_link, "SILENCE_SECONDS", 0.3)
    relay = await fleet.relay()
    link = await _link(fleet, relay)
    former = relay.holdings.get("target")
    words = r"lost during the pull from seed \(shm\): .* said nothing for 0\.3 s"
    with pytest.raises(RelayUnreachable, match=words):
        await link.pull(PullOptions(), lambda _: None)
    await eventually(lambda: former.detached and relay.holdings.find("target"))
    await link.close()


async def test_a_relay_that_was_started_anew(fleet):
    """Who was told that nobody is there learns at once that somebody is there again."""
    relay = await fleet.relay()
    await fleet.stop(relay)
    client = fleet.client(relay)
    with pytest.raises(Unreachable):
        await client.attachment()
    await fleet.relay(listen=relay.address)
    path, _ = await client.attachment()
    assert Path(path).exists()


def _sockets() -> int:
    links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


def _three_blocks(read_blocks):
    """Sends three blocks and then hangs, for good."""
    left = iter(range(3))

    async def some(self, request, context):
        messages = read_blocks(self, request, context)
        for _ in left:
            yield await anext(messages)
        await _hang()

    return some
