"""The data port lets in who shows a grant, gives what it permits, and outlives everybody else."""

import socket
import time

import pytest
from dataport import LAYOUT, Port, reason_of
from fakes import resources
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay_service.core.attachment import Update
from relay_service.core.grants import TOKEN_BYTES
from relay_service.core.instance import FILLING_EPOCH, State, Weights
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.transports import tcp_feed, tcp_server
from relay_service.transports.tcp_wire import HELLO_BYTES, MAGIC, RUN_BLOCKS, Kind, pack

ALL = list(range(LAYOUT.block_count))
SOON_SECONDS = 20


@pytest.fixture
def port():
    """A data port; when it has closed, nothing is left of it."""
    before = resources()
    port = Port()
    yield port
    port.close()
    assert before.are_back()


def until(condition) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def run_of(wire, first: int, epoch: int = 1) -> list[bytes]:
    """Receives the run that begins with a block, and returns the bytes of each."""
    kind, block, count = wire.receive_frame()
    while kind == Kind.WAIT:
        kind, block, count = wire.receive_frame()
    assert (kind, block) == (Kind.DATA, first)
    assert 1 <= count <= RUN_BLOCKS
    blocks = [bytearray(LAYOUT.block(index).nbytes) for index in range(first, first + count)]
    wire.receive(*blocks)
    assert wire.receive_frame() == (Kind.GOOD, first, epoch)
    return [bytes(data) for data in blocks]


def block_of(wire, index: int) -> bytes:
    """Receives a run of one block and returns its bytes."""
    (data,) = run_of(wire, index)
    return data


def all_right(port: Port, wire, first: int, count: int) -> bool:
    """Whether blocks come in runs, with their bytes."""
    end = first + count
    while first < end:
        for data in run_of(wire, first):
            if not is_right(port, first, data):
                return False
            first += 1
    return first == end


def is_right(port: Port, index: int, data: bytes) -> bool:
    """Whether these are the bytes of a block."""
    block = LAYOUT.block(index)
    return data == port.data[block.offset : block.offset + block.nbytes]


def reads(port: Port, blocks=ALL) -> None:
    """Reads as a good reader does."""
    lease = port.lease()
    (token,) = port.tokens(lease, blocks)
    with port.admitted(token) as wire:
        wire.send(*(pack(Kind.READ, index, 1) for index in blocks))
        assert all(is_right(port, index, block_of(wire, index)) for index in blocks)
        wire.send(pack(Kind.DONE))
    port.holdings.leases.release(lease)
    until(lambda: not port.guests)


def ended(sock) -> bool:
    """Whether the other side has ended the connection, whatever it said before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_blocks_come_as_they_are_asked_for(port):
    """A reader gets each block byte for byte, run after run, and its bytes are counted."""
    (token,) = port.tokens(port.lease(), ALL)
    with port.admitted(token) as wire:
        for first, count in ((4, 3), (0, 1), (4, 1), (0, 8)):
            wire.send(pack(Kind.READ, first, count))
            assert all_right(port, wire, first, count)
        wire.send(pack(Kind.DONE))
    nbytes = sum(LAYOUT.block(index).nbytes for index in (4, 5, 6, 0, 4, *ALL))
    until(lambda: port.holdings.leases.bytes_served["tcp"] == nbytes)
    until(lambda: port.grants.in_use == 0)


@pytest.mark.parametrize(("quick", "later"), [(60.0, [8]), (0.0, [4, 4])], ids=["quick", "slow"])
def test_runs_grow_as_long_as_they_are_quick(port, quick, later, monkeypatch):
    """Who takes a run quickly gets longer ones, who is slow never does."""
    monkeypatch.setattr(tcp_feed, "QUICK_SECONDS", quick)
    (token,) = port.tokens(port.lease(), ALL)
    with port.admitted(token) as wire:
        for expected in ([4, 4], later):
            wire.send(pack(Kind.READ, 0, len(ALL)))
            runs = []
            while sum(runs) < len(ALL):
                runs.append(len(run_of(wire, sum(runs))))
            assert runs == expected
        wire.send(pack(Kind.DONE))


def test_runs_of_what_is_being_filled_stay_short(port, monkeypatch):
    """Who reads from a reader waits for its verdicts, however quickly it takes its runs."""
    monkeypatch.setattr(tcp_feed, "QUICK_SECONDS", 60.0)
    with port.being_filled("half") as lease:
        (token,) = port.tokens(lease, ALL)
        with port.admitted(token) as wire:
            for _ in range(2):
                wire.send(pack(Kind.READ, 0, len(ALL)))
                assert [len(run_of(wire, first, FILLING_EPOCH + 1)) for first in (0, 4)] == [4, 4]
            wire.send(pack(Kind.DONE))


def test_a_grant_is_for_one_connection(port):
    """Who shows it a second time is refused with words, also while the first one reads."""
    (token,) = port.tokens(port.lease(), ALL)
    with port.admitted(token) as wire:
        with port.connected(MAGIC + token) as again:
            refused = b""
            while part := again.recv(1 << 16):
                refused += part
        assert b"Refused: the grant is unknown, was used or has expired" in refused
        wire.send(pack(Kind.READ, 5, 1))
        assert is_right(port, 5, block_of(wire, 5))


@pytest.mark.parametrize(
    "frame",
    [
        pack(Kind.READ, 4, 1), pack(Kind.READ, 0, 3), pack(Kind.READ, 0, 0),
        pack(Kind.READ, 1 << 63, 1), pack(Kind.READ, 0, (1 << 64) - 1), pack(Kind.GOOD, 0, 1),
        bytes(24), b"\xff" * 24,
    ],
)  # fmt: skip
def test_what_was_not_granted(port, frame):
    """Blocks outside the grant, and what is no question at all, end the connection."""
    (token,) = port.tokens(port.lease(), [0, 1, 5])
    with port.admitted(token) as wire:
        wire.send(frame)
        assert "not granted" in reason_of(wire)
        with pytest.raises(ConnectionError):
            wire.receive_frame()
    reads(port)


def test_a_lease_that_ends(port):
    """A grant is worth nothing without its lease, before the first block and after it."""
    lease = port.lease()
    first, second = port.tokens(lease, ALL, 2)
    with port.admitted(first) as wire, port.admitted(second) as other:
        wire.send(pack(Kind.READ, 0, 1))
        block_of(wire, 0)
        port.holdings.leases.release(lease)
        for one in (wire, other):
            one.send(pack(Kind.READ, 1, 1))
            assert reason_of(one).startswith("LeaseEnded: ")


def test_weights_that_change(port):
    """A reader of weights that are others by now hears just that."""
    (token,) = port.tokens(port.lease(), ALL)
    with port.admitted(token) as wire:
        wire.send(pack(Kind.READ, 0, 1))
        block_of(wire, 0)
        weights = Weights("v2", port.holding.weights.digest, 2)
        port.holding.apply(Update(state=State.READY, weights=weights))
        wire.send(pack(Kind.READ, 1, 1))
        assert reason_of(wire).startswith("EpochChanged: ")


@pytest.mark.parametrize("run", [[5], [4, 5, 6]], ids=["one", "several"])
def test_a_commit_while_blocks_are_sent(port, run):
    """Bytes that may be of two commits are never called good."""
    (token,) = port.tokens(port.lease(), ALL)
    arena, view = port.holding._readers._arenas[0], None
    view = arena.view

    def changing(offset: int, nbytes: int) -> memoryview:
        port.memory.arenas[0].sequence += 1
        return view(offset, nbytes)

    arena.view = changing
    with port.admitted(token) as wire:
        wire.send(pack(Kind.READ, run[0], len(run)))
        assert wire.receive_frame() == (Kind.DATA, run[0], len(run))
        wire.receive(*(bytearray(LAYOUT.block(index).nbytes) for index in run))
        assert reason_of(wire).startswith("EpochChanged: ")


def test_a_caller_that_says_nothing(port, monkeypatch):
    """Who connects and shows no grant is cut, however slowly it talks."""
    monkeypatch.setattr(tcp_server, "HELLO_SECONDS", 0.2)
    with port.connected() as silent, port.connected(MAGIC) as slow:
        assert ended(silent)
        assert ended(slow)
    reads(port)


def test_many_callers_that_say_nothing(port, monkeypatch):
    """Strangers take nobody's place: the oldest is cut for the next one."""
    monkeypatch.setattr(tcp_server, "MAX_STRANGERS", 2)
    monkeypatch.setattr(tcp_server, "HELLO_SECONDS", 60)
    with port.connected() as oldest, port.connected(), port.connected():
        assert ended(oldest)
        reads_among_strangers = port.tokens(port.lease(), [0])[0]
        with port.admitted(reads_among_strangers) as wire:
            wire.send(pack(Kind.READ, 0, 1))
            assert is_right(port, 0, block_of(wire, 0))


def test_a_reader_that_does_not_read(port, monkeypatch):
    """A reader that hangs is left, its connection is free again, and its lease ends soon."""
    monkeypatch.setattr(tcp_feed, "STALL_SECONDS", 0.2)
    lease = port.lease()
    (token,) = port.tokens(lease, ALL)
    held = port.holdings.leases.use(lease)
    long = held.expires_at
    with port.admitted(token) as wire:
        for _ in range(40):
            wire.send(pack(Kind.READ, 0, 5))
        until(lambda: port.grants.in_use == 0)
    until(lambda: held.expires_at < long)
    reads(port)


@pytest.mark.parametrize("politely", [True, False])
def test_a_reader_that_leaves(port, politely):
    """The lease of a reader that may have died ends soon; one that is done keeps it."""
    lease = port.lease()
    (token,) = port.tokens(lease, ALL)
    with port.admitted(token) as wire:
        wire.send(pack(Kind.READ, 0, 1))
        block_of(wire, 0)
        if politely:
            wire.send(pack(Kind.DONE))
    until(lambda: not port.guests)
    left = port.holdings.leases._leases[lease].expires_at - time.monotonic()
    assert (left > 6) == politely


def test_a_source_with_a_limit(port):
    """A source that waits for its own limit says so meanwhile."""
    port.egress.bytes_per_second = 4 * BLOCK_BYTES
    (token,) = port.tokens(port.lease(), ALL)
    with port.admitted(token) as wire:
        wire.send(pack(Kind.READ, 0, 2))
        block_of(wire, 0)
        assert wire.receive_frame()[0] == Kind.WAIT
        assert is_right(port, 1, block_of(wire, 1))


def test_closing_ends_every_reader(port):
    """A port that closes does not wait for readers that hang, nor for its own limit."""
    port.egress.bytes_per_second = 1
    hanging, waiting = port.tokens(port.lease(), ALL, 2)
    with port.admitted(hanging), port.admitted(waiting) as wire, port.connected():
        wire.send(pack(Kind.READ, 0, 2))
        block_of(wire, 0)
        assert wire.receive_frame()[0] == Kind.WAIT
        began = time.monotonic()
        port.close()
        assert time.monotonic() - began < tcp_feed.STALL_SECONDS / 2


JUNK = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda junk: MAGIC + junk),
    st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES).map(lambda junk: MAGIC + junk),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(junk=JUNK, admitted=st.booleans())
def test_junk_harms_nobody(port, junk, admitted):
    """Whatever somebody says, with a grant or without, no block is lost to those who read."""
    if admitted:
        (token,) = port.tokens(port.lease(), [0])
        junk = MAGIC + token + junk
    with port.connected(junk) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert ended(sock)
    until(lambda: not port.guests)
    assert port.grants.in_use == 0
    assert len(MAGIC) + TOKEN_BYTES == HELLO_BYTES
    reads(port, [5])
