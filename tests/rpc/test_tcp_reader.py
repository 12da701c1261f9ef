"""Reading over a data port whose source hangs, dies or lies: what was verified is kept."""

import asyncio
import socket
import time

import pytest
from dataport import LAYOUT, InPlaceArena, LandRank, Script
from fakes import BytesArena, eventually, instance, resources
from hypothesis import given, settings
from hypothesis import strategies as st

from relay_service.core.digests import block_digest
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.rate import TokenBucket
from relay_service.core.reading import Copied
from relay_service.core.receiver import Receiver
from relay_service.errors import CorruptBlock, EpochChanged, LeaseEnded, NotYet, SourceFailed
from relay_service.transports import tcp, tcp_read, tcp_wire
from relay_service.transports.tcp import TcpTransport
from relay_service.transports.tcp_wire import FRAME_BYTES, Kind, pack

IN_TIME_SECONDS = 5
BLOCKS = list(range(LAYOUT.block_count))


def nothing(*_) -> None:
    """Says nothing."""


@pytest.fixture
def script():
    """Starts scripts; when they have ended nothing is left of them."""
    before, scripts = resources(), []

    def start(say) -> Script:
        scripts.append(Script(lambda peer: say(scripts[-1], peer)))
        return scripts[-1]

    yield start
    for one in scripts:
        one.stop()
    assert before.are_back()


def receiver_of(script, arena=None) -> Receiver:
    """Returns a receiver of what the script should say."""
    receiver = Receiver(LAYOUT, arena or InPlaceArena(LAYOUT.data_bytes))
    receiver.expect(script.manifest_of_rank)
    return receiver


async def read(script, receiver, blocks=BLOCKS) -> None:
    """Reads blocks into their places."""
    session = await TcpTransport(script).open(script.source, "target")
    land = LandRank(Copied([script.manifest_of_rank], [receiver]), 0)
    async with asyncio.timeout(IN_TIME_SECONDS):
        await session.read(0, blocks, land, TokenBucket())


async def test_blocks_land_where_they_are_received(script):
    """Each block is received in its place, and copied nowhere."""
    source = script(lambda s, peer: peer.sendall(b"".join(map(s.message, BLOCKS))))
    receiver = receiver_of(source)
    await read(source, receiver)
    assert receiver.complete
    for index in BLOCKS:
        block = LAYOUT.block(index)
        assert receiver._arena.view(block.offset, block.nbytes) == source.block(index)


async def test_a_run_of_blocks(script):
    """Blocks that come under one verdict land in their places, whatever run they are in."""
    runs = [BLOCKS[:3], BLOCKS[3:4], BLOCKS[4:]]
    source = script(lambda s, peer: peer.sendall(b"".join(map(s.run, runs))))
    receiver = receiver_of(source)
    await read(source, receiver)
    assert receiver.complete
    assert receiver.bytes_moved == LAYOUT.weight_bytes
    for index in BLOCKS:
        block = LAYOUT.block(index)
        assert receiver._arena.view(block.offset, block.nbytes) == source.block(index)


async def test_a_run_into_an_arena_that_only_it_writes(script):
    """Such an arena gets a run out of a buffer, block by block."""
    arena = BytesArena(LAYOUT.data_bytes)
    arena.place = nothing
    runs = [BLOCKS[:1], BLOCKS[1:5], BLOCKS[5:]]
    source = script(lambda s, peer: peer.sendall(b"".join(map(s.run, runs))))
    receiver = receiver_of(source, arena)
    await read(source, receiver)
    assert receiver.complete


async def test_a_run_with_no_verdict(script):
    """Of a run that was never said to be good nothing has landed, of the one before all."""
    source = script(
        lambda s, peer: (peer.sendall(s.run([0, 1]) + s.run([2, 3])[:-1]), peer.close())
    )
    receiver = receiver_of(source)
    with pytest.raises(SourceFailed, match="lost"):
        await read(source, receiver)
    assert receiver.missing == BLOCKS[2:]


async def test_a_wrong_byte_in_a_run(script):
    """It costs its own block, and no other of the run."""

    def say(script, peer) -> None:
        message = bytearray(script.run([0, 1, 2]))
        message[FRAME_BYTES + BLOCK_BYTES] ^= 1
        peer.sendall(message)

    source = script(say)
    receiver = receiver_of(source)
    with pytest.raises(CorruptBlock, match=r"rank 0, tensor w\.0, block 1"):
        await read(source, receiver, [0, 1, 2])
    assert receiver.missing == BLOCKS[1:2] + BLOCKS[3:]


async def test_a_block_whose_end_comes_late(script, monkeypatch):
    """What has come of its end is taken, though a byte is missing still, and nothing follows."""
    monkeypatch.setattr(tcp_wire, "STEP_SECONDS", 2 * IN_TIME_SECONDS)
    arena = InPlaceArena(LAYOUT.data_bytes)

    def say(script, peer) -> None:
        # Of less than this the kernel may tell later: what is before the end comes for certain.
        data, message, come = script.block(0), script.message(0), BLOCK_BYTES - 1
        peer.sendall(message[: FRAME_BYTES + come])
        asyncio.run(eventually(lambda: arena.data[:come] == data[:come]))
        peer.sendall(message[FRAME_BYTES + come :])

    source = script(say)
    receiver = receiver_of(source, arena)
    await read(source, receiver, [0])
    assert receiver.blocks_verified == 1


async def test_a_source_that_waits_and_says_so(script):
    """A source that is slow on purpose isn't blamed."""

    def say(script, peer) -> None:
        for index in BLOCKS:
            peer.sendall(pack(Kind.WAIT) * 3 + script.message(index))

    source = script(say)
    receiver = receiver_of(source)
    await read(source, receiver)
    assert receiver.complete


async def test_a_connection_that_is_cut_within_a_block(script):
    """What came before is kept; the block that was cut is missing, and only that is asked for."""

    def say(script, peer) -> None:
        peer.sendall(script.message(0) + script.message(1)[: 1 << 19])
        peer.close()

    source = script(say)
    receiver = receiver_of(source)
    with pytest.raises(SourceFailed, match="lost"):
        await read(source, receiver)
    assert receiver.missing == BLOCKS[1:]
    assert receiver.bytes_reread == 0
    other = script(lambda s, peer: peer.sendall(b"".join(map(s.message, BLOCKS[1:]))))
    await read(other, receiver, receiver.missing)
    assert receiver.complete


async def test_a_source_that_hangs_within_a_block(script, monkeypatch):
    """A source that falls silent is left in time, also when some bytes trickle in."""
    monkeypatch.setattr(tcp, "STALL_SECONDS", 0.3)

    def say(script, peer) -> None:
        peer.sendall(script.message(0) + script.message(1)[:1000])
        while True:
            peer.sendall(b"x")
            time.sleep(0.05)  # a trickle, not a wait

    source = script(say)
    receiver = receiver_of(source)
    with pytest.raises(SourceFailed, match=r"no block for 0\.3 s"):
        await read(source, receiver)
    assert receiver.missing == BLOCKS[1:]


async def test_a_source_that_takes_no_hello(monkeypatch):
    """A data port behind which nobody answers is left in time."""
    monkeypatch.setattr(tcp, "STALL_SECONDS", 0.3)
    script = Script(nothing)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        script.address = f":{mute.getsockname()[1]}"
        with pytest.raises(SourceFailed, match=r"no block for 0\.3 s"):
            await read(script, receiver_of(script))
    script.stop()


async def test_wrong_bytes(script):
    """A wrong byte is named, the block counts as missing, and what came before is kept."""

    def say(script, peer) -> None:
        message = bytearray(script.message(1))
        message[100] ^= 1
        peer.sendall(script.message(0) + message)

    source = script(say)
    receiver = receiver_of(source)
    with pytest.raises(CorruptBlock, match=r"rank 0, tensor w\.0, block 1"):
        await read(source, receiver)
    assert receiver.missing == BLOCKS[1:]
    assert receiver.blocks_failed == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (b"EpochChanged: others", EpochChanged),
        (b"LeaseEnded: over", LeaseEnded),
        (b"NotYet: to come", NotYet),
        (b"NotFound: gone", SourceFailed),
        (b"KeyboardInterrupt: \xff", SourceFailed),
    ],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_reasons_of_a_source(script, reason, error, after):
    """A reason means what it says, before a block and after its bytes; then it hasn't landed."""

    def say(script, peer) -> None:
        data = script.block(0)
        before = pack(Kind.DATA, 0, 1) + data if after else b""
        peer.sendall(before + pack(Kind.FAILED, len(reason)) + reason)

    source = script(say)
    receiver = receiver_of(source)
    with pytest.raises(error) as raised:
        await read(source, receiver)
    assert type(raised.value) is error
    assert receiver.blocks_verified == 0


LIES = {
    "another block": lambda s: s.message(1),
    "more blocks than a run has": lambda s: s.run(BLOCKS[:5]),
    "a run without end": lambda _: pack(Kind.DATA, 0, 1 << 40),
    "no block": lambda _: pack(Kind.DATA, 0, 0),
    "a reason without end": lambda _: pack(Kind.FAILED, 1 << 40),
    "another epoch": lambda s: s.message(0)[:-8] + (9).to_bytes(8, "little"),
    "no verdict": lambda s: s.message(0)[:-24] + pack(Kind.DATA, 1, 1),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_source_that_breaks_the_protocol(script, lie, monkeypatch):
    """A frame that isn't the one that must come ends the read; nothing of it has landed."""
    monkeypatch.setattr(tcp_read, "RUN_BLOCKS", 4)
    source = script(lambda s, peer: peer.sendall(LIES[lie](s)))
    receiver = receiver_of(source)
    with pytest.raises(SourceFailed, match="broke the protocol"):
        await read(source, receiver)
    assert receiver.blocks_verified == 0


@settings(max_examples=30, deadline=None)
@given(
    junk=st.one_of(
        st.binary(max_size=100),
        st.tuples(st.integers(0, 9), st.integers(0, (1 << 64) - 1), st.binary(max_size=60)).map(
            lambda parts: pack(parts[0], parts[1], 100) + parts[2]
        ),
    )
)
def test_junk_from_a_source(junk):
    """Whatever a source says, a read ends with a typed error and nothing has landed."""

    def say(peer) -> None:
        peer.sendall(junk)
        peer.shutdown(socket.SHUT_WR)

    script = Script(say)
    receiver = receiver_of(script)
    with pytest.raises((SourceFailed, EpochChanged, LeaseEnded)):
        asyncio.run(read(script, receiver))
    script.stop()
    assert receiver.blocks_verified == 0


async def test_a_read_that_is_cancelled(script):
    """A cancelled read ends at once, though the source hangs, and lets its memory go."""
    source = script(lambda s, peer: peer.sendall(s.message(0) + s.message(1)[:1000]))
    receiver = receiver_of(source)
    reading = asyncio.create_task(read(source, receiver))
    await eventually(lambda: receiver.blocks_verified == 1)
    reading.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert time.monotonic() - began < tcp.STALL_SECONDS / 2
    with receiver.place([1]) as place:
        assert place is not None


async def test_why_a_data_port_is_unusable(script, monkeypatch):
    """A way says in words why it leads nowhere."""
    monkeypatch.setattr(tcp, "REACH_SECONDS", 0.2)
    source = script(nothing)
    transport, open_port = TcpTransport(source), source.address
    assert await transport.unusable(source.source) == ""
    source.address = ""
    assert "has no data port: it is too old" in await transport.unusable(source.source)
    for address in ("nonsense", ":0", ":70000", ":-1", f":{10**30}"):
        source.address = address
        assert "is no address of a data port" in await transport.unusable(source.source)
    source.address = "192.0.2.1:9"  # leads nowhere, by RFC 5737
    assert "data port 192.0.2.1:9: " in await transport.unusable(source.source)
    source.address = open_port
    away = instance(address="nobody.invalid:1")
    assert "data port nobody.invalid" in await transport.unusable(away)


def test_a_block_is_received_by_one_at_a_time():
    """Whoever receives a block in its place has it alone; others' bytes are left out."""
    script = Script(nothing)
    receiver = receiver_of(script, BytesArena(LAYOUT.data_bytes))
    right, other = script.block(0), memoryview(bytes(len(script.block(0))))
    with receiver.place([0]) as place, receiver.place([0, 1]) as second:
        assert second is None
        receiver.land(0, other)
        assert (receiver.blocks_verified, receiver.bytes_reread) == (0, len(right))
        place.memory[0][:] = right
        place.landed([block_digest(right)])
    assert receiver.blocks_verified == 1
    with receiver.place([1, 0]) as place:
        assert place is None, "a verified block is never received over"
    script.stop()


def test_a_wide_wire():
    """Much may be on its way to a reader before it has received anything."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        tcp_wire.wrap(sock, IN_TIME_SECONDS).widen()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > 4 * before
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
