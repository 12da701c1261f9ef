"""Memory that a serving instance lends, so that new weights land beside its own."""

import errno
import os

import pytest
from fakes import (
    LentMemory,
    lay_out_bytes,
    random_bytes,
    replace,
    resources,
    same_weights,
    verified,
)
from test_holding import Host

from relay_service.core.attachment import Update
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import BLOCK_BYTES, HEADER_BYTES, weights_digest
from relay_service.core.record import record
from relay_service.errors import ManifestError, NotFound, ResourceExhausted, WrongState
from relay_service.memory import sparse
from relay_service.memory.host import create_memfd, seal
from relay_service.memory.sparse import create_sparse_memfd

LAYOUT = lay_out_bytes([3 * BLOCK_BYTES, 100, BLOCK_BYTES])
DATA = random_bytes(LAYOUT)
CHANGED = 3
"""Flat index of the block that new weights have otherwise: the small one."""
NEW_DATA = DATA[: LAYOUT.block(CHANGED).offset] + bytes(100) + DATA[3 * BLOCK_BYTES + 100 :]
NEW = verified(LAYOUT, NEW_DATA)


class Serving(Host):
    """A host on which one instance serves."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_held = self.memory(DATA, layouts=(LAYOUT,))
        self.held = self.hold("target", self.memory_held)
        self.lent = LentMemory([LAYOUT])

    def lend(self, *descriptors: int):
        """Lends memory, or what is given instead; returns the receiver of it."""
        self.held.lend([os.dup(fd) for fd in descriptors or self.lent.descriptors])
        return self.held.lent

    def land(self, receiver, index: int) -> None:
        """Lands a block of the new weights."""
        block = LAYOUT.block(index)
        receiver.land(index, memoryview(NEW_DATA)[block.offset : block.offset + block.nbytes])

    def read(self) -> bytes:
        """Reads what serves, as a transport does."""
        with self.held.reading(0, 1) as arena:
            return bytes(arena.view(0, LAYOUT.data_bytes))

    def close(self) -> None:
        """Lets go of everything."""
        self.lent.close()
        super().close()


@pytest.fixture
def host():
    """A host with a serving instance; what it opens and maps is gone at the end."""
    before = resources()
    host = Serving()
    yield host
    host.close()
    assert before.are_back()


def test_only_what_differs_lands_and_is_allocated(host):
    """Equal blocks count as there; one that differs lands beside, and takes its memory only."""
    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    assert host.lent.allocated_blocks == 0
    assert receiver.expect(NEW) == LAYOUT.block_count - 1
    assert receiver.missing == [CHANGED]
    host.land(receiver, CHANGED)
    assert receiver.complete
    assert receiver.manifest() == NEW
    assert host.lent.bytes_at(CHANGED) == bytes(100)
    assert not any(host.lent.bytes_at(0))
    assert host.lent.allocated_blocks == 0  # of 4 KiB pages one is less than a block
    assert same_weights(LAYOUT, host.read(), DATA)


def test_other_weights_after_some_have_landed(host):
    """Of a second source only what differs from what serves must come, whatever came before."""
    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    receiver.expect(verified(LAYOUT, bytes(LAYOUT.data_bytes)))
    assert receiver.blocks_verified == 0
    receiver.land(0, memoryview(bytes(BLOCK_BYTES)))
    receiver.expect(NEW)
    assert receiver.missing == [CHANGED]
    host.land(receiver, CHANGED)
    assert receiver.manifest() == NEW


def test_weights_that_come_in_pieces(host):
    """Of a source that is cut otherwise nothing is known to be equal: all of it has to come."""
    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    receiver.expect(NEW)
    receiver.expect_pieces(keep=False)
    assert receiver.missing == list(range(LAYOUT.block_count))
    assert receiver.bytes_verified == 0


def test_what_serves_is_announced(host):
    """While weights land beside, and after it, the instance is announced with what it serves."""
    before = record(host.held, "", 0)
    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    receiver.expect(NEW)
    with pytest.raises(NotFound, match="staged nothing for rank 0"):
        host.held.manifest(0, staged=True)
    host.land(receiver, CHANGED)
    host.held.lent.keep([receiver.manifest()])
    assert record(host.held, "", 0) == before
    assert host.held.manifest(0) == host.memory_held.manifests[0] != NEW
    assert host.held.manifest(0, staged=True) == NEW
    with pytest.raises(NotFound):
        host.held.manifest(1, staged=True)
    assert host.held.return_mapping() == 1
    assert host.held.return_mapping() == 0
    with pytest.raises(NotFound):
        host.held.manifest(0, staged=True)


@pytest.mark.parametrize(
    "state", [State.STARTING, State.DUMMY, State.LANDING, State.UPDATING, State.DRAINING,
              State.STOPPED, State.FAILED],
)  # fmt: skip
def test_only_one_that_serves_lends(host, state):
    """An instance that does not serve, or is about to change, lends nothing; all is closed."""
    other = host.hold("other", host.memory(DATA, layouts=(LAYOUT,)), state=state)
    before = resources()
    with pytest.raises(WrongState, match=f"other is {state}"):
        other.lend([os.dup(host.lent.descriptors[0])])
    assert other.lent is None
    assert before.are_back()


def _unsealed() -> int:
    fd = os.memfd_create("lent", os.MFD_CLOEXEC)
    os.truncate(fd, HEADER_BYTES + LAYOUT.data_bytes)
    return fd


def _for_reading() -> int:
    lent = LentMemory([LAYOUT])
    fd = os.dup(lent.descriptors[0])
    lent.close()
    seal(fd)
    return fd


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (_unsealed, ManifestError, "must be sealed against shrinking"),
        (lambda: create_sparse_memfd("lent", LAYOUT.data_bytes), ManifestError, "not an arena of"),
        (lambda: create_memfd("lent", 4096), ManifestError, "manifest needs"),
        (_for_reading, ResourceExhausted, "cannot map"),
        (lambda: os.open("/dev/null", os.O_RDWR), ManifestError, "manifest needs"),
    ],
    ids=["unsealed", "no header", "too small", "for reading", "no memory"],
)
def test_memory_that_cannot_be_lent(host, make, error, words):
    """Memory that might fault, or is no arena, is refused; what serves is as it was."""
    fd, before = make(), resources()
    with pytest.raises(error, match=words):
        host.lend(fd)
    assert host.held.lent is None
    assert before.are_back()
    os.close(fd)
    assert same_weights(LAYOUT, host.read(), DATA)
    host.lend()


def test_the_second_of_two_ranks(host):
    """When a later rank's memory is refused, that of the first is unmapped as well."""
    layouts = [LAYOUT, replace(LAYOUT, rank=1)]
    held = host.hold("two", host.memory(DATA, DATA, layouts=layouts))
    before = resources()
    with pytest.raises(ManifestError):
        held.lend([os.dup(host.lent.descriptors[0]), _unsealed()])
    assert before.are_back()


def test_a_lent_memory_is_for_one_pull(host):
    """One pull fills it; new memory takes its place unless a pull is filling it."""
    host.lend()
    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    with pytest.raises(WrongState, match="filled already"):
        host.held.lent.open_receivers()
    with pytest.raises(WrongState, match="target is being filled already"):
        host.lend()
    host.held.lent.keep([receiver.layout])
    host.lend()
    host.held.lent.open_receivers()


@pytest.mark.parametrize("how", ["host", "file system"])
def test_a_full_host(host, monkeypatch, how):
    """A block for which there is no memory is an error, before it is written."""

    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    receiver.expect(NEW)
    if how == "host":
        monkeypatch.setattr(sparse, "available_bytes", lambda: 99)
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    words = "99 bytes are available" if how == "host" else "No space left"
    with pytest.raises(ResourceExhausted, match=f"cannot allocate 100 bytes .*: {words}"):
        host.land(receiver, CHANGED)
    assert receiver.missing == [CHANGED]
    assert not any(host.lent.bytes_at(CHANGED))


def test_the_host_is_asked_again(host, monkeypatch):
    """Blocks are allowed as long as what the host has lasts, and then no more."""
    asked = []

    def available() -> int:
        asked.append(1)
        return 2 * BLOCK_BYTES if len(asked) == 1 else 0

    monkeypatch.setattr(sparse, "available_bytes", available)
    host.lend()
    (receiver,) = host.held.lent.open_receivers()
    receiver.expect(verified(LAYOUT, bytes(LAYOUT.data_bytes)))
    for index in range(2):
        receiver.land(index, memoryview(bytes(BLOCK_BYTES)))
    assert host.lent.allocated_blocks == len(asked) + 1
    with pytest.raises(ResourceExhausted):
        receiver.land(2, memoryview(bytes(BLOCK_BYTES)))


def test_updates_meanwhile(host):
    """Memory is lent beside certain weights: others, or none, and what lands is in vain."""
    lent = host.lend()
    digest = host.memory_held.digest
    for state, weights in (
        (State.READY, Weights("a new name", digest, 1)),
        (State.PAUSED, Weights("a new name", digest, 1)),
        (State.UPDATING, Weights("a new name", digest, 1)),
    ):
        host.held.apply(Update(state=state, weights=weights))
        assert not host.held.lent_in_vain
    new = Weights("v2", weights_digest([NEW]), 2)
    host.held.apply(Update(state=State.READY, weights=new, manifests=(NEW,)))
    assert host.held.lent_in_vain
    assert host.held.lent is lent
    host.lend()
    assert not host.held.lent_in_vain
    host.held.apply(Update(state=State.FAILED, weights=new))
    assert host.held.lent_in_vain


def test_leaving_gives_it_back(host):
    """Lent memory goes with its engine, though readers keep the arenas for a while."""
    host.holdings.acquire("target", "", 1, host.memory_held.digest, "reader")
    before = resources()
    host.lend()
    host.held.lent.open_receivers()
    host.holdings.detach(host.held)
    assert before.are_back()
    assert same_weights(LAYOUT, host.read(), DATA)
    with pytest.raises(WrongState):
        host.lend()
