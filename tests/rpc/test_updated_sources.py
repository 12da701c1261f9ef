"""Targets of a source that is updated, where the news travels slower than the weights."""

import asyncio

import pytest
from fakes import PROBE, Memory, eventually, random_bytes, same_weights
from relays import LAYOUT

from clients.errors import CallFailed
from relay_service.core.instance import State, Weights
from relay_service.core.match import Target
from relay_service.rpc import directory_link
from seedrelay.v1 import relay_pb2, weights_pb2

NEW_DATA = random_bytes(LAYOUT, 77)


@pytest.fixture(autouse=True)
def _renew_often(monkeypatch):
    """Announces often: what is under test is that there is a while between."""
    monkeypatch.setattr(directory_link, "RENEW_SECONDS", 0.4)


async def three_hosts(fleet):
    """Returns a source, and a dummy's relay; both know each other by a third one's word."""
    third = await fleet.relay()
    here = await fleet.relay(join=third.address)
    there = await fleet.relay(join=third.address)
    seed = await fleet.seed(here)
    await fleet.dummy(there)
    client = fleet.client(third)

    async def announced() -> bool:
        return len(await client.sources(Target())) == 2

    await eventually(announced)
    return here, there, seed


async def commit(seed, state: State = State.READY) -> None:
    """Updates the source in place."""
    (arena,) = seed.memory.arenas
    arena.sequence += 1
    seed.memory.fill([NEW_DATA])
    arena.sequence += 1
    await seed.update(
        state=state, weights=Weights("v2", seed.memory.digest, 2), probe=PROBE,
        manifests=tuple(seed.memory.manifests),
    )  # fmt: skip


async def pull(client):
    """Pulls to the end; returns the report."""
    *_, last = [m async for m in client.pull("target", weights_pb2.PullOptions())]
    return last.report


async def test_news_that_has_not_arrived(fleet):
    """A source that was updated a moment ago is taken with what it holds, once that is known."""
    here, there, seed = await three_hosts(fleet)
    await commit(seed, State.PAUSED)
    report = await pull(fleet.client(there))
    assert report.weight_version == "v2"
    right = Memory([LAYOUT], [NEW_DATA])
    assert report.weights_digest == right.digest
    right.close()
    assert report.bytes_moved == LAYOUT.weight_bytes
    assert here.holdings.leases.count() == 0


async def test_a_source_in_the_middle_of_an_update(fleet):
    """A target that comes while a source is updated waits for what it will hold."""
    _, there, seed = await three_hosts(fleet)
    await seed.update(state=State.UPDATING, weights=Weights("v1", seed.memory.digest, 1))
    pulling = asyncio.create_task(pull(fleet.client(there)))
    await eventually(lambda: there.transfers.running)
    puller = there.transfers.running[0].puller
    await eventually(lambda: puller.report.note)
    await commit(seed)
    assert (await pulling).weight_version == "v2"
    receiver = there.holdings.get("target").receivers[0]
    assert receiver.manifest() == seed.memory.manifests[0]
    assert same_weights(LAYOUT, seed.memory.contents(), NEW_DATA)


async def test_a_manifest_of_weights_that_are_gone(fleet):
    """Whoever asks for the manifest of an epoch is told when there is another one."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    client = fleet.client(relay)
    assert await client.manifest("seed", "", 0, epoch=1) == seed.memory.manifests[0]
    await commit(seed)
    with pytest.raises(CallFailed, match="is at epoch 2, not 1") as gone:
        await client.manifest("seed", "", 0, epoch=1)
    assert (gone.value.code, gone.value.reason) == ("FAILED_PRECONDITION", "EpochChanged")
    assert relay_pb2.GetManifestRequest().epoch == 0
    assert await client.manifest("seed", "", 0) == seed.memory.manifests[0]
