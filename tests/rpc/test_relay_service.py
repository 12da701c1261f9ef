"""A relay over real sockets: the fleet it knows, and what it gives away."""

import asyncio
import hashlib

import grpc
import pytest
from fakes import FORMAT, PROBE, eventually, instance
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.errors import CallFailed, Unreachable
from clients.relay import RelayClient
from relay_service.app import Relay
from relay_service.config import RelayConfig
from relay_service.core import registry
from relay_service.core.dtypes import DType
from relay_service.core.format import Format, Placement
from relay_service.core.instance import State
from relay_service.core.layout import TensorSpec, UnitSpec, check, lay_out
from relay_service.core.manifest import Manifest
from relay_service.core.match import Target
from relay_service.errors import ConfigError
from seedrelay.v1 import relay_pb2, relay_pb2_grpc, weights_pb2

OTHER = Format((("kernel_format", "1"), ("dtype", "float32"), ("config.hidden_size", "64")))


async def test_the_attachment(fleet):
    """A relay says where engines attach, and which life of it this is."""
    relay = await fleet.relay()
    path, generation = await fleet.client(relay).attachment()
    assert path.endswith(".sock")
    assert len(generation) == 32


async def test_standard_health(fleet):
    """A relay that listens is healthy, as itself and by its service's name."""
    relay = await fleet.relay()
    stub = health_pb2_grpc.HealthStub(fleet.client(relay).channel)
    for name in ("", "seedrelay.v1.RelayService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use(fleet):
    """A second relay on a port is refused with a message; ports that the system chooses differ."""
    relays = [await fleet.relay() for _ in range(5)]
    assert len({relay.address for relay in relays}) == 5
    with pytest.raises(ConfigError, match="the port is in use"):
        Relay(RelayConfig(listen=relays[0].address))


async def test_sources_with_reasons(fleet):
    """Every known instance is listed, those that fit first, the others with their reason."""
    relay = await fleet.relay()
    await fleet.seed(relay, "b-seed")
    await fleet.seed(relay, "a-seed", format=OTHER)
    await fleet.dummy(relay, "c-dummy")
    found = await fleet.client(relay).sources(Target("me", FORMAT, Placement()))
    assert [(m.instance.instance, m.reason) for m in found] == [
        ("b-seed", ""),
        ("a-seed", "dtype: seed float32, target bfloat16"),
        ("c-dummy", "state: DUMMY holds no complete weights"),
    ]
    assert found[0].instance.format == FORMAT
    assert found[0].instance.address == relay.address


async def test_status(fleet):
    """The status shows every instance with its blocks and weights, and the leases."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    client = fleet.client(relay)
    (record,) = [m.instance for m in await client.sources(Target())]
    await client.acquire_lease(record, "reader")
    status = await client.status()
    (shown,) = status.instances
    assert (shown.instance, shown.weight_version, shown.weights_digest) == (
        "seed", "v1", seed.memory.digest,
    )  # fmt: skip
    assert shown.ranks[0].have_blocks == shown.ranks[0].blocks == fleet.layout.block_count
    assert (status.lease_count, shown.lease_count, status.directory) == (1, 1, "")


# The directory


def renew_fast(monkeypatch) -> None:
    """Shortens the renewal interval: how long it is is not under test."""
    monkeypatch.setattr("relay_service.rpc.directory_link.RENEW_SECONDS", 0.05)


async def known(client: RelayClient) -> set[str]:
    """Names every instance that a relay lists."""
    return {m.instance.instance for m in await client.sources(Target())}


async def test_a_joined_relay_announces_its_instances(fleet, monkeypatch):
    """A directory lists the instances of relays that joined it, at their address, and they its."""
    renew_fast(monkeypatch)
    directory = await fleet.relay()
    joined = await fleet.relay(join=directory.address)
    await fleet.seed(directory, "here")
    await fleet.seed(joined, "there")
    for relay in (directory, joined):
        client = fleet.client(relay)

        async def sees_both(client=client) -> bool:
            return await known(client) == {"here", "there"}

        await eventually(sees_both)
        addresses = {
            m.instance.instance: m.instance.address for m in await client.sources(Target())
        }
        assert addresses == {"here": directory.address, "there": joined.address}


async def test_a_clean_leave_is_not_listed(fleet, monkeypatch):
    """A relay that ends says goodbye: its instances are gone at once, before they expire."""
    renew_fast(monkeypatch)
    monkeypatch.setattr(registry, "EXPIRY_SECONDS", 3600)
    directory = await fleet.relay()
    joined = await fleet.relay(join=directory.address)
    await fleet.seed(joined, "there")
    client = fleet.client(directory)

    async def lists(*names: str) -> bool:
        return await known(client) == set(names)

    await eventually(lambda: lists("there"))
    await fleet.stop(joined)
    await eventually(lists)


async def test_a_crashed_relay_expires(fleet):
    """What a relay that is silent has announced is not listed after the expiry."""
    directory = await fleet.relay()
    client = fleet.client(directory)
    await client.announce("127.0.0.1:9", "life", [instance("crashed")])
    assert await known(client) == {"crashed"}
    directory._fleet._registry._clock = lambda: 1e12
    assert await known(client) == set()


async def test_a_restarted_directory_is_whole_again(fleet, monkeypatch):
    """A directory that lost its memory lists every source again after they renew by themselves."""
    renew_fast(monkeypatch)
    directory = await fleet.relay()
    joined = await fleet.relay(join=directory.address)
    await fleet.seed(joined, "there")
    await eventually(lambda: joined._fleet.directory_reachable)
    await fleet.stop(directory)
    await eventually(lambda: not joined._fleet.directory_reachable)
    again = await fleet.relay(listen=directory.address)
    client = fleet.client(again)

    async def lists_it() -> bool:
        return await known(client) == {"there"}

    await eventually(lists_it)


async def test_without_its_directory(fleet):
    """A relay whose directory is away still knows and lists its own instances."""
    relay = await fleet.relay(join="127.0.0.1:9")
    await fleet.seed(relay, "mine")
    client = fleet.client(relay)
    assert await known(client) == {"mine"}
    assert not (await client.status()).directory_reachable


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (relay_pb2.AnnounceRequest(), "needs the relay's address"),
        (
            relay_pb2.AnnounceRequest(address="a:1", instances=[relay_pb2.Instance()]),
            "needs a name and a generation",
        ),
        (
            relay_pb2.AnnounceRequest(
                address="a:1", instances=[relay_pb2.Instance(instance="a", generation="b")]
            ),
            "unknown state 0",
        ),
        (
            relay_pb2.AnnounceRequest(
                address="a:1",
                instances=[relay_pb2.Instance(instance="a", generation="b", state=77)],
            ),
            "unknown state 77",
        ),
    ],
)
async def test_a_false_announcement(fleet, request_, words):
    """An announcement that makes no sense is refused and changes nothing."""
    client = fleet.client(await fleet.relay())
    stub = relay_pb2_grpc.RelayServiceStub(client.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Announce(request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in refused.value.details()
    assert await known(client) == set()


# What is given away


async def test_artifacts(fleet):
    """Small files are streamed by their digest, to the last byte, an empty one too."""
    relay = await fleet.relay()
    files = {
        "config.json": b"{}",
        "tokenizer.json": bytes(range(256)) * 20_000,
        "chat_template.jinja": b"",
    }
    await fleet.seed(relay, artifacts=files)
    client = fleet.client(relay)
    (record,) = [m.instance for m in await client.sources(Target())]
    assert {a.name: a.nbytes for a in record.artifacts} == {n: len(d) for n, d in files.items()}
    for artifact in record.artifacts:
        data = await client.artifact(artifact.sha256, 1 << 23)
        assert data == files[artifact.name]
        assert hashlib.sha256(data).hexdigest() == artifact.sha256
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        await client.artifact(hashlib.sha256(files["tokenizer.json"]).hexdigest(), 100)
    with pytest.raises(CallFailed) as missing:
        await client.artifact("0" * 64, 100)
    assert (missing.value.code, missing.value.reason) == ("NOT_FOUND", "NotFound")
    assert missing.value.details == {"field": "sha256", "found": "0" * 64}


def big_layout(units: int, tensors: int, name_chars: int) -> Manifest:
    """Lays out many small tensors with long names."""
    pad = "é" * name_chars
    return lay_out(
        0,
        [
            UnitSpec(
                f"unit.{u}",
                tuple(
                    TensorSpec(f"{u}.{t}.{pad}", DType.U8, (1,), logical=pad)
                    for t in range(tensors)
                ),
            )
            for u in range(units)
        ],
    )


@pytest.mark.parametrize(("units", "tensors", "name_chars"), [(9000, 2, 3), (300, 20, 200)])
async def test_a_manifest_of_many_units(fleet, units, tensors, name_chars):
    """A manifest beyond any message limit arrives whole, in pages of at most 1 MiB."""
    layout = big_layout(units, tensors, name_chars)
    relay = await fleet.relay()
    seed = await fleet.engine(relay, "seed", bytes(layout.data_bytes), layout=layout)
    client = fleet.client(relay)
    received = await client.manifest("seed", "", 0)
    assert received == seed.memory.manifests[0]
    check(received)
    stub = relay_pb2_grpc.RelayServiceStub(client.channel)
    pages = [p async for p in stub.GetManifest(relay_pb2.GetManifestRequest(instance="seed"))]
    assert len(pages) > 1
    assert max(page.ByteSize() for page in pages) <= 1 << 20


async def test_a_manifest_that_is_not_here(fleet):
    """The manifest of an unknown instance, life or rank is `NOT_FOUND`."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    client = fleet.client(relay)
    for asked in [("nobody", "", 0), ("seed", "other life", 0), ("seed", "", 1), ("seed", "", -1)]:
        with pytest.raises(CallFailed) as refused:
            await client.manifest(*asked)
        assert refused.value.code == "NOT_FOUND"


# Leases


async def test_leases(fleet):
    """A lease is granted with the probe, renewed, given back, and over then."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    client = fleet.client(relay)
    stub = relay_pb2_grpc.RelayServiceStub(client.channel)
    (record,) = [m.instance for m in await client.sources(Target())]
    granted = await client.acquire_lease(record, "reader")
    lease, probe = granted.lease, granted.probe
    assert probe == PROBE
    assert (await stub.RenewLease(relay_pb2.RenewLeaseRequest(lease=lease))).expiry.seconds > 0
    await client.release_lease(lease)
    await client.release_lease(lease)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stub.RenewLease(relay_pb2.RenewLeaseRequest(lease=lease))
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert relay.holdings.leases.count() == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"instance": "nobody"}, "NOT_FOUND"),
        ({"generation": "other"}, "NOT_FOUND"),
        ({"instance": "dummy", "generation": ""}, "FAILED_PRECONDITION"),
        ({"weights": "stale"}, "FAILED_PRECONDITION"),
    ],
)
async def test_no_lease(fleet, changes, code):
    """Nobody leases what is not here, is not complete, or is something else by now."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    await fleet.dummy(relay, "dummy")
    client = fleet.client(relay)
    record = (await client.sources(Target()))[0].instance
    if changes.pop("weights", None):
        changes["weights"] = instance().weights
    fields = {name: getattr(record, name) for name in record.__struct_fields__} | changes
    with pytest.raises(CallFailed) as refused:
        await client.acquire_lease(type(record)(**fields), "reader")
    assert refused.value.code == code
    assert relay.holdings.leases.count() == 0


async def read_blocks(client: RelayClient, **request) -> list[relay_pb2.ReadBlocksResponse]:
    """Reads blocks with the generated class, as a client in another language does."""
    stub = relay_pb2_grpc.BlockServiceStub(client.channel)
    return [r async for r in stub.ReadBlocks(relay_pb2.ReadBlocksRequest(**request))]


async def test_blocks_for_any_language(fleet):
    """The generated client with default options reads every block of a leased arena."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    client = fleet.client(relay)
    (record,) = [m.instance for m in await client.sources(Target())]
    lease = (await client.acquire_lease(record, "reader")).lease
    indexes = list(range(fleet.layout.block_count))
    async with grpc.aio.insecure_channel(relay.address) as channel:
        stub = relay_pb2_grpc.BlockServiceStub(channel)
        request = relay_pb2.ReadBlocksRequest(lease=lease, rank=0, blocks=indexes)
        messages = [message async for message in stub.ReadBlocks(request)]
    assert [(m.block, m.epoch) for m in messages] == [(index, 1) for index in indexes]
    for message in messages:
        block = fleet.layout.block(message.block)
        assert message.data == fleet.data[block.offset : block.offset + block.nbytes]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"lease": "forged"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"blocks": [-1]}, grpc.StatusCode.OUT_OF_RANGE),
        ({"blocks": [1 << 62]}, grpc.StatusCode.OUT_OF_RANGE),
        ({"rank": 1}, grpc.StatusCode.NOT_FOUND),
        ({"rank": -1}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_reading_what_may_not_be_read(fleet, changes, code):
    """Without a lease, or beyond the arena, nothing is read, and the next call works."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    client = fleet.client(relay)
    (record,) = [m.instance for m in await client.sources(Target())]
    lease = (await client.acquire_lease(record, "reader")).lease
    good = {"lease": lease, "rank": 0, "blocks": [0]}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read_blocks(client, **(good | changes))
    assert refused.value.code() is code
    assert len(await read_blocks(client, **good)) == 1


async def test_an_oversized_request_states_the_limit(fleet):
    """A request beyond the message limit is refused with the limit; the channel goes on."""
    client = fleet.client(await fleet.relay())
    stub = relay_pb2_grpc.RelayServiceStub(client.channel)
    huge = relay_pb2.AnnounceRequest(address="a" * (4 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Announce(huge)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(4 << 20) in refused.value.details()
    assert await known(client) == set()


async def test_nobody_answers():
    """A relay that is not there is `Unreachable`, by its address."""
    async with RelayClient("127.0.0.1:9") as client:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 cannot be reached"):
            await client.attachment(timeout=5)


async def test_an_engine_that_leaves_is_not_listed(fleet):
    """An instance is known until its connection ends."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    client = fleet.client(relay)
    assert await known(client) == {"seed"}
    seed.leave()

    async def lists_nobody() -> bool:
        return await known(client) == set()

    await eventually(lists_nobody)


async def test_two_relays_that_join_each_other(fleet, monkeypatch):
    """Relays that name each other as directory answer at once, each with what both know."""
    renew_fast(monkeypatch)
    first = await fleet.relay()
    second = await fleet.relay(join=first.address)
    await fleet.stop(first)
    first = await fleet.relay(listen=first.address, join=second.address)
    await fleet.seed(first, "one")
    await fleet.seed(second, "two")
    await eventually(lambda: first._fleet.directory_reachable)
    await eventually(lambda: second._fleet.directory_reachable)
    client = fleet.client(first)
    assert await asyncio.wait_for(known(client), 5) == {"one", "two"}


async def test_state_changes_are_seen(fleet):
    """What an engine says of its state is what the fleet sees."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    weights = instance().weights
    await seed.update(state=State.FAILED, weights=type(weights)())
    (shown,) = (await fleet.client(relay).status()).instances
    assert shown.state == weights_pb2.INSTANCE_STATE_FAILED
