"""Relays that name several directories, and lives that come one after another at one address."""

import pytest
from fakes import eventually, instance, lay_out_bytes, random_bytes, same_weights, transfer_state

from clients.errors import CallFailed, DeadlineExceeded
from relay_service.core import registry
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.match import Target
from relay_service.core.record import record
from relay_service.core.registry import MAX_TRANSFERS_PER_RELAY
from relay_service.errors import LeaseEnded, NotFound
from relay_service.rpc import directory
from seedrelay.v1 import weights_pb2


@pytest.fixture(autouse=True)
def _renew_fast(monkeypatch):
    """Shortens the renewal interval: how long it is is not under test."""
    monkeypatch.setattr("relay_service.rpc.directory_link.RENEW_SECONDS", 0.1)


async def known(client) -> dict[str, str]:
    """Returns the generation of every instance that a relay lists."""
    return {m.instance.instance: m.instance.generation for m in await client.sources(Target())}


async def lists(client, *names: str) -> bool:
    """Whether a relay lists exactly these."""
    return set(await known(client)) == set(names)


async def reachable(client) -> dict[str, bool]:
    """Returns which directories of a relay answer."""
    return {one.address: one.reachable for one in (await client.status()).directories}


async def test_whole_when_any_directory_answers(fleet):
    """Everybody announces to all and asks all: with one of them gone nobody is missed."""
    first, second = await fleet.relay(), await fleet.relay()
    both = f"{first.address}, {second.address}"
    here, there = await fleet.relay(join=both), await fleet.relay(join=both)
    await fleet.seed(here)
    target = await fleet.dummy(there)
    client = fleet.client(there)
    for relay in (first, second, here, there):
        await eventually(lambda relay=relay: lists(fleet.client(relay), "seed", "target"))
    assert await reachable(client) == {first.address: True, second.address: True}
    await fleet.stop(first)
    await eventually(lambda: not there._fleet.directories[0].reachable)
    assert await reachable(client) == {first.address: False, second.address: True}
    status = await client.status()
    assert (status.directory, status.directory_reachable) == (
        f"{first.address},{second.address}", True,
    )  # fmt: skip
    assert there._fleet.missing == ""
    done = [m async for m in client.pull("target", weights_pb2.PullOptions())][-1].report
    assert done.path[-1].source_instance == "seed"
    assert same_weights(fleet.layout, target.memory.contents(), fleet.data)


async def test_no_directory_answers(fleet):
    """Then all of them are named, in the status and by a pull that found nobody."""
    relay = await fleet.relay(join="127.0.0.1:9,127.0.0.1:10")
    await fleet.dummy(relay)
    client = fleet.client(relay)
    await eventually(lambda: relay._fleet.directory_reachable is False)
    assert await reachable(client) == {"127.0.0.1:9": False, "127.0.0.1:10": False}
    options = weights_pb2.PullOptions()
    options.timeout.FromMilliseconds(200)
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:9 does not answer") as no:
        _ = [m async for m in client.pull("target", options)]
    assert "127.0.0.1:10 does not answer" in str(no.value)


async def test_one_list_for_all(fleet):
    """A relay that finds itself in its list is a directory, and announces to the others."""
    first = await fleet.relay()
    second = await fleet.relay(join=first.address)
    await fleet.stop(first)
    everybody = f"{first.address},{second.address}"
    first = await fleet.relay(listen=first.address, join=everybody)
    assert [one.address for one in first._fleet.directories] == [second.address]
    await fleet.seed(first, "one")
    await fleet.seed(second, "two")
    for relay in (first, second):
        await eventually(lambda relay=relay: lists(fleet.client(relay), "one", "two"))


async def test_a_directory_that_is_started_anew_at_its_address(fleet):
    """It knows everybody again by itself, while the other one has known them all along."""
    first, second = await fleet.relay(), await fleet.relay()
    joined = await fleet.relay(join=f"{first.address},{second.address}")
    await fleet.seed(joined, "there")
    await eventually(lambda: lists(fleet.client(first), "there"))
    await fleet.stop(first)
    assert await lists(fleet.client(second), "there")
    await eventually(lambda: not joined._fleet.directories[0].reachable)
    again = await fleet.relay(listen=first.address)
    await eventually(lambda: lists(fleet.client(again), "there"))


async def test_a_fleet_of_very_many_transfers(fleet, monkeypatch):
    """As many are shown as fit into a message, those that run before those that have ended."""
    relay = await fleet.relay()
    client = fleet.client(relay)
    for host in range(10):
        outcomes = ["complete"] * (MAX_TRANSFERS_PER_RELAY - 1) + [""]
        told = [
            transfer_state(f"t{host}x{number}", outcome=outcome)
            for number, outcome in enumerate(outcomes)
        ]
        await client.announce(f"host:{host}", "life", [instance(f"i{host}")], transfers=told)
    monkeypatch.setattr(directory, "MAX_SHOWN", 100)
    status = await client.status()
    assert len(status.transfers) == 10
    assert len(status.ended_transfers) == 90


async def test_a_relay_that_is_started_anew_is_another_life(fleet):
    """What its former life announces late is refused; what it lists is of the new one."""
    directory = await fleet.relay()
    client = fleet.client(directory)
    joined = await fleet.relay(join=directory.address)
    former = joined._fleet.generation, joined._fleet._start_microseconds
    await fleet.stop(joined)
    joined = await fleet.relay(listen=joined.address, join=directory.address)
    await fleet.seed(joined)
    await eventually(lambda: lists(client, "seed"))
    now = await known(client)
    for late in ([instance("ghost")], []):
        with pytest.raises(CallFailed) as refused:
            await client.announce(joined.address, former[0], late, order=(former[1], 1 << 40))
        assert (refused.value.code, refused.value.reason) == ("ALREADY_EXISTS", "Conflict")
        assert await known(client) == now


async def test_an_engine_that_is_started_anew_is_another_life(fleet):
    """Who leased its former life reads that one to the end, or nothing; never the new one."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    client = fleet.client(relay)
    before = record(relay.holdings.get("seed"), relay.address, 0)
    lease = (await client.acquire_lease(before, "reader")).lease
    seed.leave()
    await eventually(lambda: lists(client))
    again = await fleet.engine(relay, "seed", random_bytes(fleet.layout, 2), generation="next")
    assert again.memory.digest != seed.memory.digest
    leased, holding = relay.holdings.leased(lease)
    assert (leased.generation, holding.generation) == (before.generation, before.generation)
    with pytest.raises(CallFailed) as gone:
        await client.acquire_lease(before, "reader")
    assert gone.value.code == "NOT_FOUND"
    await client.release_lease(lease)
    with pytest.raises((LeaseEnded, NotFound)):
        relay.holdings.leased(lease)
    assert await known(client) == {"seed": "next"}


async def test_an_engine_that_dies_is_gone_at_once(fleet, monkeypatch):
    """Its relay sees its socket close and tells the directory, before anything is renewed."""
    monkeypatch.setattr("relay_service.rpc.directory_link.RENEW_SECONDS", 3600)
    monkeypatch.setattr(registry, "EXPIRY_SECONDS", 3600)
    directory = await fleet.relay()
    joined = await fleet.relay(join=directory.address)
    client = fleet.client(directory)
    seed = await fleet.seed(joined)
    await fleet.dummy(joined)
    await eventually(lambda: lists(client, "seed", "target"))
    seed.leave()
    await eventually(lambda: lists(client, "target"))


async def test_two_models_and_two_relays_on_one_host(fleet):
    """Each relay has its own socket and instances; a target of two models needs one named."""
    fleet.layout = lay_out_bytes([2 * BLOCK_BYTES])
    fleet.data, tuned = random_bytes(fleet.layout), bytes(2 * BLOCK_BYTES)
    directory = await fleet.relay()
    joined = await fleet.relay(join=directory.address)
    paths = {(await fleet.client(one).attachment())[0] for one in (directory, joined)}
    assert len(paths) == 2
    await fleet.seed(directory, "one", model="base")
    await fleet.seed(joined, "two", model="base")
    await fleet.engine(joined, "three", tuned, model="tuned")
    target = await fleet.dummy(joined, "four")
    client = fleet.client(joined)
    await eventually(lambda: lists(client, "one", "two", "three", "four"))
    with pytest.raises(CallFailed) as refused:
        _ = [m async for m in client.pull("four", weights_pb2.PullOptions())]
    assert refused.value.reason == "Ambiguous"
    assert "base, tuned" in refused.value.message
    named = weights_pb2.PullOptions(source_instance="tuned")
    done = [m async for m in client.pull("four", named)][-1].report
    assert (done.model, done.path[-1].source_instance) == ("tuned", "three")
    assert same_weights(fleet.layout, target.memory.contents(), tuned)
