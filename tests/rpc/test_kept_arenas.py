"""Arenas that a relay keeps for the next life of an engine: who gets them, and until when."""

import asyncio
import os

import pytest
from fakes import (
    FORMAT,
    PROBE,
    FakeClock,
    eventually,
    lay_out_bytes,
    random_bytes,
    same_weights,
    verified,
)

from clients.errors import CallFailed
from engine_service.errors import ConfigError, WrongState
from engine_service.rpc import reclaiming
from relay_service.core.attachment import Denied, Update, decode_kept, encode
from relay_service.core.channel import AsyncChannel, ChannelClosed
from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.reclaiming import MAX_KEEP_SECONDS, Reclaim
from relay_service.memory.host import HostArena
from relay_service.rpc.metrics import RelayCollector
from seedrelay.v1 import weights_pb2

ASKED = "tiny v1"


async def kept(fleet, relay, name: str = "seed", **changes):
    """Has an instance serve and end, whose arena is kept; returns its engine."""
    fields = {"keep_seconds": 60.0, "started_as": ASKED} | changes
    seed = await fleet.seed(relay, name, **fields)
    seed.memory.seal()
    seed.leave()
    await eventually(lambda: not relay.holdings.records(""))
    return seed


async def take(fleet, relay, **changes):
    """Asks for what is kept and takes it; returns what was handed back."""
    fields = {"format": FORMAT, "placement": Placement(), "manifests": [fleet.layout]} | changes
    found = await reclaiming.ask(fleet.client(relay), "seed", ASKED)
    assert found is not None
    try:
        return await found.take(fields["format"], fields["placement"], fields["manifests"])
    finally:
        found.close()


async def bytes_kept(fleet, relay) -> list[int]:
    """Returns the memory of each arena that the relay says it keeps."""
    return [one.arena_bytes for one in (await fleet.client(relay).status()).kept_arenas]


async def test_a_kept_arena_is_handed_back_once(fleet):
    """The next life gets the memory itself, with what it held; then the relay has let go of it."""
    relay = await fleet.relay()
    seed = await kept(fleet, relay, artifacts={"config.json": b"{}"})
    (shown,) = (await fleet.client(relay).status()).kept_arenas
    assert (shown.instance, shown.weight_version) == ("seed", "v1")
    assert shown.weights_digest == seed.memory.digest
    assert 50 < shown.expiry.ToTimedelta().total_seconds() <= 60
    counted = RelayCollector(relay.holdings, relay.transfers, relay._fleet).collect()
    values = {one.name: one.samples[0].value for one in counted if "kept" in one.name}
    assert values == {
        "seedrelay_relay_kept_arenas": 1,
        "seedrelay_relay_kept_arena_bytes": fleet.layout.data_bytes,
    }
    found = await reclaiming.ask(fleet.client(relay), "seed", ASKED)
    assert (found.files, found.model) == ({"config.json": b"{}"}, "tiny")
    assert found.arena_bytes == fleet.layout.data_bytes
    handed, (fd,) = await found.take(FORMAT, Placement(), [fleet.layout])
    assert handed.weights == Weights("v1", seed.memory.digest, 1)
    assert (handed.manifests, handed.probe) == (tuple(seed.memory.manifests), PROBE)
    arena = HostArena(fd, fleet.layout.data_bytes, writable=False)
    assert same_weights(fleet.layout, bytes(arena.view(0, arena.data_bytes)), fleet.data)
    arena.close()
    os.close(fd)
    found.close()
    assert await reclaiming.ask(fleet.client(relay), "seed", ASKED) is None
    assert await bytes_kept(fleet, relay) == []


OTHER_FORMAT = Format((("kernel_format", "1"), ("dtype", "float32")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": OTHER_FORMAT}, "dtype: seed bfloat16, target float32"),
        ({"placement": Placement(2)}, "tensor_parallel_size: seed 1, target 2"),
        ({"manifests": [lay_out_bytes([1])]}, "unit: seed big.1048575, target unit.0"),
        ({"manifests": []}, "ranks: seed 1, target 0"),
    ],
)
async def test_a_taker_of_another_kind_is_refused(fleet, changes, words):
    """It is told the first difference, and the arena stays for one that fits."""
    relay = await fleet.relay()
    await kept(fleet, relay)
    with pytest.raises(WrongState, match=words):
        await take(fleet, relay, **changes)
    _, (fd,) = await take(fleet, relay)
    os.close(fd)


@pytest.mark.parametrize(("name", "asked"), [("other", ASKED), ("seed", "tiny v2")])
async def test_another_name_or_another_wish_gets_nothing(fleet, name, asked):
    """Whoever is started for other weights than before shall not be given the former ones."""
    relay = await fleet.relay()
    await kept(fleet, relay)
    assert await reclaiming.ask(fleet.client(relay), name, asked) is None
    assert len(await bytes_kept(fleet, relay)) == 1


async def test_two_takers(fleet):
    """Of two that ask at once one gets it, the other hears that there is nothing."""
    relay = await fleet.relay()
    await kept(fleet, relay)
    first, second = [await reclaiming.ask(fleet.client(relay), "seed", ASKED) for _ in range(2)]
    _, (fd,) = await first.take(FORMAT, Placement(), [fleet.layout])
    with pytest.raises(WrongState, match="no arena of seed is kept"):
        await second.take(FORMAT, Placement(), [fleet.layout])
    os.close(fd)
    first.close()
    second.close()


async def test_its_time_is_over(fleet):
    """Then the memory is given back, by itself, and whoever comes later gets nothing."""
    relay = await fleet.relay()
    clock = relay.holdings.kept._clock = FakeClock()
    await kept(fleet, relay)
    found = await reclaiming.ask(fleet.client(relay), "seed", ASKED)
    (holding,) = [one.holding for one in relay.holdings.kept]
    clock.now += 60
    with pytest.raises(WrongState, match="no arena of seed is kept"):
        await found.take(FORMAT, Placement(), [fleet.layout])
    found.close()
    relay.holdings.sweep()
    assert holding._descriptors == []
    assert await bytes_kept(fleet, relay) == []


@pytest.mark.parametrize("how", ["operator", "engine", "next life", "relay"])
async def test_it_is_let_go_before(fleet, how):
    """By an operator, by an engine without use for it, by the next life, and with the relay."""
    relay = await fleet.relay()
    await kept(fleet, relay)
    client = fleet.client(relay)
    (holding,) = [one.holding for one in relay.holdings.kept]
    if how == "operator":
        await client.forget_arena("seed")
        with pytest.raises(CallFailed, match="no arena of 'seed' is kept") as refused:
            await client.forget_arena("seed")
        assert refused.value.code == "NOT_FOUND"
    elif how == "engine":
        found = await reclaiming.ask(client, "seed", ASKED)
        await found.let_go()
        found.close()
    elif how == "next life":
        await fleet.seed(relay)
    else:
        await fleet.stop(relay)
    assert holding._descriptors == []
    assert not list(relay.holdings.kept)


@pytest.mark.parametrize(
    "changes",
    [{"keep_seconds": 0.0}, {"state": State.DUMMY, "weights": Weights()}, {"state": State.FAILED}],
)
async def test_what_is_not_kept(fleet, changes):
    """Nothing of an engine that did not ask, nor of one that held no proven weights at its end."""
    relay = await fleet.relay()
    await kept(fleet, relay, **changes)
    assert await bytes_kept(fleet, relay) == []
    assert await reclaiming.ask(fleet.client(relay), "seed", ASKED) is None


async def test_what_has_landed_is_kept(fleet):
    """Of a dummy that ends while it is filled, the next life hears which blocks had come."""
    relay = await fleet.relay()
    fleet.layout = lay_out_bytes([8 << 20])
    fleet.data = random_bytes(fleet.layout)
    source = await fleet.seed(relay, "source")
    target = await fleet.dummy(relay, "seed", keep_seconds=60.0, started_as=ASKED)
    slow = weights_pb2.PullOptions(rate_limit_bytes_per_second=8 << 20)

    async def fill() -> None:
        async for message in fleet.client(relay).pull("seed", slow):
            if message.progress.bytes_verified > 1 << 20 and target.channel:
                target.leave()

    with pytest.raises(CallFailed, match="was ended"):
        await fill()
    await eventually(lambda: list(relay.holdings.kept))
    handed, (fd,) = await take(fleet, relay)
    os.close(fd)
    digests = handed.manifests[0].units[0].digests
    came = [digest for digest in digests if digest]
    assert 1 <= len(came) < len(digests)
    assert set(came) < set(source.memory.manifests[0].units[0].digests)
    assert handed.weights == Weights()


async def test_nobody_keeps_for_ever(fleet):
    """An attachment that asks for more than the longest time is denied."""
    relay = await fleet.relay()
    with pytest.raises(AssertionError, match="keep_seconds"):
        await fleet.seed(relay, keep_seconds=MAX_KEEP_SECONDS + 1)


async def test_a_reader_finishes_from_what_is_kept(fleet):
    """A pull that reads from an instance goes on when that ends."""
    relay = await fleet.relay()
    fleet.layout = lay_out_bytes([8 << 20])
    fleet.data = random_bytes(fleet.layout)
    seed = await fleet.seed(relay, keep_seconds=60.0, started_as=ASKED)
    target = await fleet.dummy(relay)
    slow = weights_pb2.PullOptions(rate_limit_bytes_per_second=8 << 20)
    moved, path = 0, []
    async for message in fleet.client(relay).pull("target", slow):
        if message.progress.bytes_verified > 1 << 20 and seed.channel:
            seed.leave()
        moved, path = message.report.bytes_moved, message.report.path
    assert [step.reason for step in path] == ["complete"]
    assert moved == fleet.layout.weight_bytes
    assert same_weights(fleet.layout, target.memory.contents(), fleet.data)
    assert len(await bytes_kept(fleet, relay)) == 1


async def test_what_it_held_last_is_what_is_handed_back(fleet):
    """An update of the former life counts, once the relay had heard of it."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay, keep_seconds=60.0, started_as=ASKED)
    new = verified(fleet.layout, random_bytes(fleet.layout, 7))
    await seed.update(state=State.UPDATING, weights=Weights("v1", seed.memory.digest, 1))
    seed.memory.arenas[0].sequence += 2
    await seed.commit([new], "v2", 2)
    seed.leave()
    await eventually(lambda: not relay.holdings.records(""))
    handed, (fd,) = await take(fleet, relay)
    os.close(fd)
    assert (handed.weights.version, handed.weights.epoch) == ("v2", 2)
    assert handed.manifests == (new,)


async def test_another_user_gets_nothing(fleet, monkeypatch):
    """The relay says nothing to a process of another user."""
    relay = await fleet.relay()
    await kept(fleet, relay)
    monkeypatch.setattr(AsyncChannel, "peer_credentials", lambda _: (1, os.getuid() + 1))
    stranger = fleet.unattached("stranger")
    path, _ = await fleet.client(relay).attachment()
    with pytest.raises(ChannelClosed):
        await stranger.say(path, encode(Reclaim("seed", ASKED)))
    with pytest.raises(ConfigError, match="runs as another user"):
        await reclaiming.ask(fleet.client(relay), "seed", ASKED)
    assert len(await bytes_kept(fleet, relay)) == 1


async def test_an_answer_that_is_none(fleet):
    """What is neither taken nor let go stays kept."""
    relay = await fleet.relay()
    await kept(fleet, relay)
    stranger = fleet.unattached("stranger")
    path, _ = await fleet.client(relay).attachment()
    with pytest.raises(Exception, match="Kept"):
        await stranger.say(path, encode(Reclaim("seed", ASKED)))
    await stranger.channel.send(encode(Update(state=State.READY, weights=Weights())))
    async with asyncio.timeout(10):
        answer = decode_kept(await stranger.channel.receive())
    assert answer == Denied("a kept arena is taken or let go")
    assert len(await bytes_kept(fleet, relay)) == 1
