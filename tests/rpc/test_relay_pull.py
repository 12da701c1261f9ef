"""Filling dummies through real relays: on one host, and from another one."""

import asyncio
import contextlib

import pytest
from fakes import PROBE, eventually, lay_out_bytes, random_bytes, same_weights

from clients.errors import CallFailed, DeadlineExceeded
from relay_service.config import socket_path
from relay_service.core.attachment import Accepted
from relay_service.core.format import Format
from relay_service.core.instance import State, Weights
from seedrelay.v1 import weights_pb2

SLOW = weights_pb2.PullOptions(rate_limit_bytes_per_second=1)
"""So slow that the pull does not end by itself."""


async def pull(client, name: str = "target", **options):
    """Pulls to the end and returns every message."""
    return [m async for m in client.pull(name, weights_pb2.PullOptions(**options))]


async def fill(fleet, client, target, **options):
    """Fills a target and commits it as its engine does."""
    *_, last = await pull(client, target.name, **options)
    assert await client.return_mapping(target.name, "", 10) == 1
    landed = [await client.manifest(target.name, "", 0)]
    await target.commit(landed, last.report.weight_version)
    assert same_weights(fleet.layout, target.memory.contents(), fleet.data)
    return last.report


async def two_hosts(fleet):
    """Returns a directory with a seed and a second relay with a dummy."""
    here = await fleet.relay()
    there = await fleet.relay(join=here.address)
    await fleet.seed(here)
    return here, there, await fleet.dummy(there)


def lengthen(fleet) -> None:
    """Gives the fleet weights so long that no buffer on the way holds them all."""
    fleet.layout = lay_out_bytes([30 << 20])
    fleet.data = random_bytes(fleet.layout)


async def test_on_one_host(fleet):
    """A dummy beside its seed is filled through shared memory, and the report is whole."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    await fleet.dummy(relay)
    messages = await pull(fleet.client(relay))
    *progress, last = messages
    report = last.report
    assert all(not message.HasField("report") for message in progress)
    assert last.probe == PROBE
    assert (report.transport, report.weight_version) == ("shm", "v1")
    assert report.weights_digest == seed.memory.digest
    assert report.bytes_moved == last.progress.bytes_total == fleet.layout.weight_bytes
    assert (report.bytes_reread, report.blocks_reused) == (0, 0)
    assert [(s.source_instance, s.reason) for s in report.path] == [("seed", "complete")]
    assert report.seconds_transfer > 0


async def test_from_another_host(fleet):
    """A dummy at a second relay is filled over sockets from the seed at the first."""
    here, there, target = await two_hosts(fleet)
    report = await fill(fleet, fleet.client(there), target)
    assert report.transport == "tcp"
    assert report.path[0].address == here.address
    assert here.holdings.leases.count() == 0


async def test_a_filled_target_is_a_source(fleet):
    """After its commit a target seeds the next one, also when the first seed has gone."""
    relay = await fleet.relay()
    seed, first = await fleet.seed(relay), await fleet.dummy(relay, "first")
    client = fleet.client(relay)
    await fill(fleet, client, first)
    seed.close()
    await eventually(lambda: len(relay.holdings.records("")) == 1)
    second = await fleet.dummy(relay, "second")
    report = await fill(fleet, client, second)
    assert [step.source_instance for step in report.path] == ["first"]


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
async def test_a_forced_transport(fleet, transport):
    """A transport that is named is the one that is used."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    await fleet.dummy(relay)
    *_, last = await pull(fleet.client(relay), transport=transport)
    assert last.report.transport == transport


async def test_a_transport_that_does_not_reach(fleet):
    """Forcing shared memory to another host fails, saying why, and maps nothing."""
    _, there, _ = await two_hosts(fleet)
    client = fleet.client(there)
    with pytest.raises(CallFailed, match="seed is not on this host") as failed:
        await pull(client, transport="shm")
    assert (failed.value.code, failed.value.reason) == ("UNAVAILABLE", "NoSource")
    assert await client.return_mapping("target", "", 10) == 0


async def refused(client, name: str = "target", **options) -> CallFailed:
    """Pulls and returns how it was refused."""
    with pytest.raises((CallFailed, DeadlineExceeded)) as found:
        await pull(client, name, **options)
    return found.value


async def test_refusals_carry_class_and_details(fleet):
    """A refused pull says what is wrong by class, field and words, before a byte moves."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    other = Format((("kernel_format", "1"), ("dtype", "float32"), ("config.hidden_size", "64")))
    await fleet.dummy(relay, "misfit", format=other)
    await fleet.dummy(relay)
    client = fleet.client(relay)
    error = await refused(client, "misfit")
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "FormatMismatch")
    assert "dtype: seed bfloat16, target float32" in error.message
    assert (error.details["field"], error.details["source"]) == ("dtype", "seed")
    error = await refused(client, "nobody")
    assert (error.code, error.reason) == ("NOT_FOUND", "NotFound")
    error = await refused(client, "seed")
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "WrongState")
    assert (error.details["expected"], error.details["found"]) == ("DUMMY", "READY")
    error = await refused(client, transport="pigeon")
    assert (error.code, error.details["expected"]) == ("INVALID_ARGUMENT", "shm, tcp, grpc")
    error = await refused(client, rate_limit_bytes_per_second=-1)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "InvalidRequest")
    error = await refused(client, source_instance="ghost", timeout={"nanos": 50_000_000})
    assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "PullTimeout")
    assert "waiting for ghost" in error.details["path"]
    assert relay.holdings.leases.count() == 0


async def test_another_layout_is_refused_by_tensor(fleet):
    """Same facts, other strides or shapes: refused with the first tensor that differs."""
    relay = await fleet.relay()
    await fleet.engine(relay, "seed", random_bytes(lay_out_bytes([64])), layout=lay_out_bytes([64]))
    await fleet.dummy(relay, layout=lay_out_bytes([65]))
    error = await refused(fleet.client(relay))
    assert error.code == "FAILED_PRECONDITION"
    assert "w.0: shape (64,) and (65,)" in error.message


async def test_an_error_with_a_long_story(fleet):
    """An error however long reaches the caller with its own status."""
    relay = await fleet.relay()
    await fleet.dummy(relay)
    name = "ghost" * 20_000
    error = await refused(fleet.client(relay), source_instance=name, timeout={"nanos": 50_000_000})
    assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "PullTimeout")


async def test_leaving_the_call_ends_the_pull(fleet):
    """A caller that leaves ends its pull: lease and mapping are returned."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    await fleet.dummy(relay)
    client = fleet.client(relay)
    messages = client.pull("target", SLOW)
    await anext(messages)
    await eventually(lambda: relay.holdings.leases.count() == 1)
    status = await client.status()
    assert [t.instance for t in status.transfers] == ["target"]
    await messages.aclose()
    await eventually(lambda: relay.transfers.running == [])
    assert relay.holdings.leases.count() == 0
    assert await client.return_mapping("target", "", 10) == 0
    await pull(client)


async def test_two_pulls_into_one_target(fleet):
    """A second pull into a target is refused while the first one runs."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    await fleet.dummy(relay)
    client = fleet.client(relay)
    messages = client.pull("target", SLOW)
    await anext(messages)
    error = await refused(client)
    assert error.reason == "WrongState"
    assert "being filled already" in error.message
    await messages.aclose()


async def test_returning_the_mapping_ends_the_pull(fleet):
    """Once the mapping is returned nothing writes, a running pull has ended, and twice is fine."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    target = await fleet.dummy(relay)
    client = fleet.client(relay)
    messages = client.pull("target", SLOW)
    await anext(messages)
    await eventually(lambda: relay.holdings.get("target").receivers[0].blocks_verified > 0)
    await client.return_mapping("target", "", 10)
    before = target.memory.contents()
    assert relay.transfers.running == []
    assert await client.return_mapping("target", "", 10) == 0
    assert target.memory.contents() == before
    with pytest.raises(CallFailed, match="the pull into target was ended") as ended:
        await _drain(messages)
    assert (ended.value.code, ended.value.reason) == ("CANCELLED", "PullEnded")
    with pytest.raises(CallFailed) as missing:
        await client.return_mapping("target", "another life", 10)
    assert missing.value.code == "NOT_FOUND"


async def _drain(messages):
    last = None
    async for last in messages:  # noqa: B007
        pass
    return last


async def test_a_target_that_dies(fleet):
    """When the target's engine dies, its pull ends with an error, not with silence."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    target = await fleet.dummy(relay)
    messages = fleet.client(relay).pull("target", SLOW)
    await anext(messages)
    target.leave()
    with pytest.raises(CallFailed, match="the pull into target was ended"):
        await _drain(messages)
    assert relay.holdings.leases.count() == 0


async def test_a_relay_that_ends_during_a_pull(fleet):
    """When the source's relay ends, the target goes on at another one with what it has."""
    lengthen(fleet)
    here, there, target = await two_hosts(fleet)
    client = fleet.client(there)
    messages = client.pull("target", weights_pb2.PullOptions(rate_limit_bytes_per_second=30 << 20))
    await anext(messages)
    await eventually(lambda: there.holdings.get("target").receivers[0].blocks_verified > 0)
    await fleet.seed(there, "second")
    await fleet.stop(here)
    last = await _drain(messages)
    assert [step.source_instance for step in last.report.path] == ["seed", "second"]
    assert last.report.bytes_moved - last.report.bytes_reread == fleet.layout.weight_bytes
    assert same_weights(fleet.layout, target.memory.contents(), fleet.data)


async def test_an_update_of_the_source_is_waited_for(fleet):
    """A seed that is updated while it is read fills the target with its new weights, unmixed."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    target = await fleet.dummy(relay)
    client = fleet.client(relay)
    messages = client.pull("target", weights_pb2.PullOptions(rate_limit_bytes_per_second=12 << 20))
    await anext(messages)
    await eventually(lambda: relay.holdings.get("target").receivers[0].blocks_verified > 0)
    seed.memory.arenas[0].sequence += 1
    await seed.update(state=State.UPDATING, weights=Weights("v1", seed.memory.digest, 1))
    new_data = random_bytes(fleet.layout, 77)
    seed.memory.fill([new_data])
    seed.memory.arenas[0].sequence += 1
    weights = Weights("v2", seed.memory.digest, 2)
    await seed.update(
        state=State.READY, weights=weights, manifests=tuple(seed.memory.manifests), probe=PROBE
    )
    last = await _drain(messages)
    assert last.report.weight_version == "v2"
    assert same_weights(fleet.layout, target.memory.contents(), new_data)


async def test_many_targets_at_once(fleet):
    """Several dummies fill from one seed at the same time."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    targets = [await fleet.dummy(relay, f"target-{n}") for n in range(4)]
    client = fleet.client(relay)
    await asyncio.gather(*(fill(fleet, client, target) for target in targets))
    assert relay.holdings.leases.count() == 0


@pytest.mark.parametrize("touched", [True, False])
async def test_a_relay_that_was_started_anew(fleet, touched):
    """It finds what the one before has landed, if the engine says that something may lie there."""
    lengthen(fleet)
    here = await fleet.relay()
    there = await fleet.relay(join=here.address)
    await fleet.seed(here)
    target = await fleet.dummy(there)
    slow = weights_pb2.PullOptions(rate_limit_bytes_per_second=10 << 20)
    async with contextlib.aclosing(fleet.client(there).pull("target", slow)) as messages:
        async for message in messages:
            if message.progress.bytes_verified > 2 << 20:
                break
    came = message.progress.bytes_verified
    await fleet.stop(there)
    target.leave()
    again = await fleet.relay(join=here.address)
    answer = await target.attach(socket_path(again.address), touched=touched)
    assert isinstance(answer, Accepted)
    report = await fill(fleet, fleet.client(again), target)
    assert bool(report.blocks_reused) == touched
    moved = fleet.layout.weight_bytes - (came if touched else 0)
    assert report.bytes_moved <= moved
    assert touched or report.bytes_moved == moved
