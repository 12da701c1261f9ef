"""Attaching over a real Unix socket, and what becomes of pulls when somebody leaves."""

import asyncio
import os
import shutil
import socket
import stat
import struct
import tempfile
from pathlib import Path

import msgspec
import pytest
from fakes import (
    PROBE,
    FakeEngine,
    FakeFleet,
    LentMemory,
    Memory,
    attach_message,
    eventually,
    lay_out_bytes,
    random_bytes,
    resources,
    same_weights,
    seam_layout,
)

from relay_service.core.attach_server import AttachServer
from relay_service.core.attachment import Accepted, Denied, Update, decode_to_engine, encode
from relay_service.core.channel import MAX_FRAME_BYTES, ChannelClosed
from relay_service.core.holdings import Holdings
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest
from relay_service.core.pull_report import PullOptions
from relay_service.core.rate import TokenBucket
from relay_service.core.record import record
from relay_service.core.transfers import Transfers
from relay_service.errors import ConfigError, CorruptBlock, WrongState
from relay_service.memory.mapping import map_arena
from relay_service.transports.shm import ShmTransport

LAYOUT = seam_layout()
DATA = random_bytes(LAYOUT)
SLOW = PullOptions(rate_limit_bytes_per_second=1)
"""So slow that a pull does not end by itself."""


class Relay:
    """A relay without gRPC: the socket, the holdings and the pulls between them."""

    missing = ""
    address = "here"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "relay" / "attach.sock"
        self.holdings = Holdings()
        self.transfers = Transfers(self, [ShmTransport(self.holdings, TokenBucket())])
        self.server = AttachServer(self.path, self.holdings, self.transfers, map_arena)
        self._engines: list[FakeEngine] = []

    def announce_soon(self) -> None:
        """Has nobody to tell."""

    async def instances(self):
        """Lists what is attached here: the whole fleet."""
        return self.holdings.records("here")

    def engine(self, name: str, *contents: bytes, layout: Manifest = LAYOUT) -> FakeEngine:
        """Starts an engine that has not attached yet."""
        self._engines.append(FakeEngine(name, Memory([layout], contents)))
        return self._engines[-1]

    async def seed(self, name: str = "seed") -> FakeEngine:
        """Starts and attaches an engine that serves."""
        engine = self.engine(name, DATA)
        assert isinstance(await engine.attach(self.path), Accepted)
        return engine

    async def dummy(self, name: str = "target") -> FakeEngine:
        """Starts and attaches an engine without weights."""
        engine = self.engine(name)
        assert isinstance(await engine.attach(self.path), Accepted)
        return engine

    def attached(self) -> list[str]:
        """Names who is attached."""
        return [record.instance for record in self.holdings.records("")]

    async def close(self) -> None:
        """Ends everything."""
        await self.server.close()
        self.holdings.close()
        for engine in self._engines:
            engine.close()


@pytest.fixture
async def relay():
    """A relay; what it and its engines open and map is gone at the end."""
    before = resources()
    folder = Path(tempfile.mkdtemp())
    relay = Relay(folder)
    await relay.server.start()
    yield relay
    await relay.close()
    shutil.rmtree(folder)
    await eventually(before.are_back)


async def assert_closed(engine: FakeEngine) -> None:
    """Checks that the relay has closed the connection."""
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(engine.channel.receive(), 10)


async def test_attaching_and_leaving(relay):
    """An instance is listed from its attachment until its connection ends."""
    seed = await relay.seed()
    assert relay.attached() == ["seed"]
    seed.leave()
    await eventually(lambda: relay.attached() == [])


def test_only_this_user_reaches_the_socket(relay):
    """The socket and its folder are for their owner alone."""
    assert stat.S_IMODE(relay.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(relay.path.parent.stat().st_mode) == 0o700


def _nested() -> bytes:
    body = {"type": "Attach", "deep": 0}
    return msgspec.msgpack.encode(body)[:-1] + b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"garbage", bytes(1000), b"\xc1", b"\x80", b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff", _nested(),
        msgspec.msgpack.encode({"type": "Attach"}),
        msgspec.msgpack.encode({"type": "Denied", "reason": "no"}),
        msgspec.msgpack.encode({"type": "Attach", "instance": b"\xff", "generation": 5}),
    ],
)  # fmt: skip
async def test_garbage_is_denied(relay, frame):
    """Whatever bytes come first, the relay says no and goes on serving others."""
    stranger = relay.engine("stranger")
    assert isinstance(await stranger.say(relay.path, frame), Denied)
    await assert_closed(stranger)
    await relay.seed()


async def test_an_oversized_frame_ends_the_connection(relay):
    """A frame that claims to be huge is not waited for."""
    reader, writer = await asyncio.open_unix_connection(str(relay.path))
    writer.write(struct.pack("<I", MAX_FRAME_BYTES + 1))
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_too_few_descriptors_are_denied(relay, count):
    """An attachment that lacks a rank's arena is denied, and what came along is closed."""
    engine = relay.engine("seed", DATA)
    message = attach_message("seed", engine.memory)
    message = msgspec.structs.replace(message, manifests=message.manifests * (count + 1))
    answer = await engine.say(relay.path, encode(message), engine.memory.descriptors * count)
    assert isinstance(answer, Denied)
    assert f"{count + 1} ranks" in answer.reason
    await assert_closed(engine)


async def test_a_name_that_is_taken_is_denied(relay):
    """A second instance of a name is told so, and the first one stays."""
    await relay.seed("seed")
    twin = relay.engine("seed", DATA)
    answer = await twin.attach(relay.path, generation="twin")
    assert isinstance(answer, Denied)
    assert "named seed is attached already" in answer.reason
    await assert_closed(twin)
    assert relay.attached() == ["seed"]


async def test_another_first_message_is_denied(relay):
    """Who does not attach first is told that it must."""
    engine = relay.engine("seed", DATA)
    frame = encode(Update(state=State.READY, weights=Weights()))
    answer = await engine.say(relay.path, frame, engine.memory.descriptors)
    assert answer == Denied("the first message must attach")
    await assert_closed(engine)


async def test_attaching_twice_is_denied(relay):
    """A second attachment on one connection ends it, and the instance with it."""
    seed = await relay.seed()
    await seed.channel.send(encode(attach_message("other", seed.memory)))
    assert isinstance(await _answer(seed), Denied)
    await assert_closed(seed)
    await eventually(lambda: relay.attached() == [])


async def _answer(engine: FakeEngine):
    return decode_to_engine(await engine.channel.receive())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"manifests": (LAYOUT, LAYOUT)}, "2 manifests for 1 ranks"),
        ({"manifests": (lay_out_bytes([1]),)}, "the arena has changed"),
        ({"manifests": (Manifest(0, -1, ()),)}, "data_bytes -1"),
        ({"weights": Weights("v2", "0" * 32, 2)}, "do not carry the weights"),
    ],
)
async def test_a_false_update_is_denied(relay, fields, words):
    """An instance that claims what it cannot prove is denied and detached."""
    seed = await relay.seed()
    good = {"state": State.READY, "weights": Weights("v1", seed.memory.digest, 1)}
    answer = await seed.update(**(good | fields))
    assert isinstance(answer, Denied)
    assert words in answer.reason
    await assert_closed(seed)
    await eventually(lambda: relay.attached() == [])


async def test_lending_memory(relay):
    """A serving instance lends memory; what is refused of it leaves the instance attached."""
    seed, lent = await relay.seed(), LentMemory([LAYOUT])
    holding = relay.holdings.get("seed")
    for _ in range(2):
        assert await seed.lend(lent.descriptors) == Accepted()
    small = LentMemory([lay_out_bytes([1])])
    answer = await seed.lend(small.descriptors)
    assert isinstance(answer, Denied)
    assert "manifest needs" in answer.reason
    assert holding.lent is None
    assert await seed.lend(lent.descriptors) == Accepted()
    assert relay.holdings.get("seed") is holding
    seed.leave()
    await eventually(lambda: holding.lent is None)
    small.close()
    lent.close()


async def test_a_dummy_lends_nothing(relay):
    """Memory of who does not serve is refused; the dummy can be filled as before."""
    await relay.seed()
    target, lent = await relay.dummy(), LentMemory([LAYOUT])
    assert await target.lend(lent.descriptors) == Denied("target is DUMMY")
    lent.close()
    await relay.transfers.start(relay.holdings.get("target"), PullOptions()).task
    assert same_weights(LAYOUT, target.memory.contents(), DATA)


async def test_lending_without_memory(relay):
    """What nobody can make sense of any more ends the connection."""
    seed = await relay.seed()
    answer = await seed.lend([])
    assert isinstance(answer, Denied)
    assert "1 ranks: 1 descriptors expected" in answer.reason
    await assert_closed(seed)
    await eventually(lambda: relay.attached() == [])


async def test_a_failed_staging_gives_memory_back(relay):
    """Once a pull into lent memory has failed nothing of it is left, whether or not one asks."""
    source = relay.engine("new", random_bytes(LAYOUT, 5))
    await source.attach(relay.path)
    source.memory.arenas[0].land(0, b"wrong")
    seed, lent, before = await relay.seed(), LentMemory([LAYOUT]), resources()
    await seed.lend(lent.descriptors)
    holding = relay.holdings.get("seed")
    with pytest.raises(CorruptBlock):
        await relay.transfers.start(holding, PullOptions()).task
    await eventually(lambda: holding.lent is None)
    assert before.are_back()
    with pytest.raises(WrongState, match="only a dummy"):
        relay.transfers.start(holding, PullOptions())
    lent.close()


async def test_staging_ends_when_other_weights_serve(relay):
    """A pull beside weights that are no more has ended before the engine hears the answer."""
    source = relay.engine("new", random_bytes(LAYOUT, 5))
    await source.attach(relay.path)
    seed, lent = await relay.seed(), LentMemory([LAYOUT])
    await seed.lend(lent.descriptors)
    holding = relay.holdings.get("seed")
    transfer = relay.transfers.start(holding, SLOW)
    await eventually(lambda: transfer.puller.blocks_landed)
    seed.memory.fill([random_bytes(LAYOUT, 6)])
    for arena in seed.memory.arenas:
        arena.sequence += 2
    await seed.commit(seed.memory.manifests, "v2", 2)
    assert transfer.task.cancelled()
    assert (holding.lent, relay.transfers.running) == (None, [])
    assert await seed.lend(lent.descriptors) == Accepted()
    report = await relay.transfers.start(holding, PullOptions(source_instance="new")).task
    assert report.weights_digest == source.memory.digest
    lent.close()


async def _finish(relay, seed, transfer) -> None:
    await transfer.task
    assert relay.holdings.get("seed").return_mapping() == 1


async def _give_up(relay, seed, transfer) -> None:
    await relay.transfers.end(relay.holdings.get("seed"))


async def _update(relay, seed, transfer) -> None:
    (arena,) = seed.memory.arenas
    arena.sequence += 1
    seed.memory.fill([random_bytes(LAYOUT, 100 + arena.sequence)])
    arena.sequence += 1
    epoch = relay.holdings.get("seed").weights.epoch + 1
    await seed.commit(seed.memory.manifests, f"v{epoch}", epoch)


async def _fail(relay, seed, transfer) -> None:
    await seed.update(state=State.FAILED, weights=Weights())


async def _leave(relay, seed, transfer) -> None:
    seed.leave()
    await eventually(lambda: "seed" not in relay.attached())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("end", [_finish, _give_up, _update, _fail, _leave])
async def test_however_a_staging_ends(relay, end, begun):
    """Nothing stays mapped, open or leased, at whatever moment what happens meanwhile happens."""
    source = relay.engine("new", random_bytes(LAYOUT, 5))
    await source.attach(relay.path)
    seed, lent = await relay.seed(), LentMemory([LAYOUT])
    holding, before = relay.holdings.get("seed"), resources()
    for _ in range(3):
        await seed.lend(lent.descriptors)
        options = PullOptions(source_instance="new") if end is _finish else SLOW
        transfer = relay.transfers.start(holding, options)
        if begun:
            await eventually(lambda transfer=transfer: transfer.puller.blocks_landed)
        await end(relay, seed, transfer)
        await eventually(lambda: holding.lent is None)
        assert transfer.task.done()
        assert relay.holdings.leases.count() == 0
        if end in (_fail, _leave):
            break
        assert before.are_back()
    lent.close()


async def test_an_engine_that_leaves_at_once(relay):
    """An engine that goes before it is answered leaves its name free."""
    for _ in range(20):
        engine = relay.engine("seed", DATA)
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.connect(str(relay.path))
        frame = encode(attach_message("seed", engine.memory))
        socket.send_fds(ours, [struct.pack("<I", len(frame)) + frame], engine.memory.descriptors)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.close()
    engine = relay.engine("seed", DATA)

    async def attaches() -> bool:
        answer = await engine.attach(relay.path)
        if isinstance(answer, Denied):
            engine.leave()
        return isinstance(answer, Accepted)

    await eventually(attaches)  # the last of them may still be on its way in


async def test_filling_from_attachment_to_ready(relay):
    """A dummy is filled through the relay, takes its mapping back, commits and is a source."""
    seed, target = await relay.seed(), await relay.dummy()
    holding = relay.holdings.get("target")
    transfer = relay.transfers.start(holding, PullOptions())
    report = await transfer.task
    assert report.probe == PROBE
    assert holding.return_mapping() == 1
    assert same_weights(LAYOUT, target.memory.contents(), DATA)
    await target.commit(holding.manifests, report.weight_version)
    assert record(relay.holdings.get("target"), "", 0).weights == Weights(
        "v1", seed.memory.digest, 1
    )
    assert relay.transfers.running == []
    assert relay.holdings.leases.count() == 0


async def test_an_engine_that_dies_ends_its_pull(relay):
    """The end of a target's connection ends the pull into it before its memory is unmapped."""
    await relay.seed()
    target = await relay.dummy()
    holding = relay.holdings.get("target")
    transfer = relay.transfers.start(holding, SLOW)
    await eventually(lambda: holding.receivers[0].blocks_verified > 0)
    assert relay.holdings.leases.count() == 1
    target.leave()
    await asyncio.wait([transfer.task])
    assert transfer.task.cancelled()
    await eventually(lambda: relay.attached() == ["seed"])
    assert relay.holdings.leases.count() == 0
    assert holding.return_mapping() == 0


async def test_an_engine_that_attaches_anew(relay):
    """An engine's new attachment takes the place of its former one, whose pull has ended by then.

    So it is when a relay was stopped, and reads that the engine has hung up only later.
    """
    await relay.seed()
    target = await relay.dummy()
    former, channel = relay.holdings.get("target"), target.channel
    transfer = relay.transfers.start(former, SLOW)
    await eventually(lambda: former.receivers[0].blocks_verified > 0)
    assert isinstance(await target.attach(relay.path), Accepted)
    assert transfer.task.cancelled()
    assert former.return_mapping() == 0
    assert relay.attached() == ["seed", "target"]
    assert relay.holdings.get("target") is not former
    channel.close()


async def test_a_seed_that_dies_is_read_to_the_end(relay):
    """A pull goes on from a dead seed's memory, which goes away when the pull is over."""
    seed, target = await relay.seed(), await relay.dummy()
    holding = relay.holdings.get("target")
    transfer = relay.transfers.start(holding, PullOptions(rate_limit_bytes_per_second=100 << 20))
    await eventually(lambda: holding.receivers[0].blocks_verified > 0)
    seed.close()
    await transfer.task
    assert same_weights(LAYOUT, target.memory.contents(), DATA)


async def test_a_pull_that_is_ended_before_it_began(relay):
    """A pull that ends before its first step leaves nothing mapped for writing."""
    await relay.seed()
    await relay.dummy()
    holding = relay.holdings.get("target")
    relay.transfers.start(holding, SLOW)
    await relay.transfers.end(holding)
    assert relay.transfers.running == []
    assert holding.return_mapping() == 0
    relay.transfers.start(holding, SLOW)
    with pytest.raises(WrongState, match="being filled already"):
        relay.transfers.start(holding, SLOW)
    await relay.transfers.end(holding)


async def test_a_refused_pull_maps_nothing(relay):
    """A pull that names an unknown transport is refused before the arenas are mapped."""
    await relay.dummy()
    holding = relay.holdings.get("target")
    with pytest.raises(ConfigError):
        relay.transfers.start(holding, PullOptions(transport="pigeon"))
    assert holding.return_mapping() == 0
    assert relay.transfers.running == []


async def test_a_failed_pull_returns_the_mapping(relay):
    """When a pull fails, the arenas are unmapped by the time that anybody hears of it."""
    await relay.dummy()
    holding = relay.holdings.get("target")
    transfer = relay.transfers.start(holding, PullOptions(timeout_seconds=0.01))
    await asyncio.wait([transfer.task])
    assert holding.return_mapping() == 0
    assert transfer.task.exception() is not None


async def test_a_stale_socket_is_replaced(relay):
    """A relay takes the place of one that was killed and left its socket behind."""
    left_behind = relay.path.with_name("stale.sock")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left_behind))
    again = AttachServer(left_behind, relay.holdings, relay.transfers, map_arena)
    await again.start()
    engine = relay.engine("seed", DATA)
    assert isinstance(await engine.attach(left_behind), Accepted)
    await again.close()
    assert not left_behind.exists()


async def test_running_out_of_descriptors_is_survived(relay, monkeypatch):
    """A relay that cannot accept for a while accepts again afterwards."""
    loop, failures = asyncio.get_running_loop(), [1, 1]
    accept = loop.sock_accept

    async def failing(sock):
        if failures:
            failures.pop()
            raise OSError(24, "Too many open files")
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", failing)
    await relay.seed("first")  # by the accept that waits already
    await relay.seed("second")
    assert "second" in relay.attached()
    assert failures == []


@pytest.mark.parametrize("found", ["open to others", "another's", "a link", "a file"])
async def test_a_folder_that_is_not_ours_alone(tmp_path, monkeypatch, found):
    """A socket folder that others may enter, or that leads elsewhere, is refused."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if found == "a link":
        folder.symlink_to(elsewhere)
    elif found == "a file":
        folder.touch(mode=0o600)
    elif found == "another's":
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.mkdir()
        folder.chmod(0o750)
    holdings = Holdings()
    server = AttachServer(folder / "relay.sock", holdings, Transfers(FakeFleet(), []), map_arena)
    with pytest.raises(ConfigError, match=str(folder)):
        await server.start()
    assert list(elsewhere.iterdir()) == []


async def test_rounds_leave_nothing_behind(relay):
    """Many rounds of attaching, filling and leaving leak no descriptor and no mapping."""
    seed = await relay.seed()
    before = resources()
    for number in range(10):
        target = await relay.dummy(f"target-{number}")
        holding = relay.holdings.get(f"target-{number}")
        transfer = relay.transfers.start(holding, PullOptions() if number % 2 else SLOW)
        if number % 2:
            await transfer.task
        target.close()
        await eventually(lambda: relay.attached() == ["seed"])
    await eventually(before.are_back)
    assert os.fstat(seed.memory.descriptors[0]).st_nlink == 0
