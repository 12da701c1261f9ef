"""Blocks that land, once each."""

import pytest
from fakes import BytesArena, lay_out_bytes, random_bytes, same_weights, seam_layout, verified

from relay_service.core.manifest import BLOCK_BYTES, Manifest
from relay_service.core.receiver import Receiver
from relay_service.errors import CorruptBlock, InvalidRequest


def block_of(manifest: Manifest, data: bytes, index: int) -> memoryview:
    """Returns a block's bytes."""
    block = manifest.block(index)
    return memoryview(data)[block.offset : block.offset + block.nbytes]


@pytest.fixture
def layout() -> Manifest:
    """Units around every seam."""
    return seam_layout()


@pytest.fixture
def data(layout) -> bytes:
    """Weights of the layout."""
    return random_bytes(layout)


@pytest.fixture
def arena(layout) -> BytesArena:
    """A dummy's arena."""
    return BytesArena(layout.data_bytes)


@pytest.fixture
def receiver(layout, data, arena) -> Receiver:
    """A receiver that expects the weights."""
    receiver = Receiver(layout, arena)
    receiver.expect(verified(layout, data))
    return receiver


def test_every_block_is_hashed_once(receiver, layout, data, arena):
    """All blocks land in any order with one pass over the bytes, and the arena is equal."""
    for index in reversed(range(layout.block_count)):
        assert not receiver.complete
        receiver.land(index, block_of(layout, data, index))
    assert receiver.complete
    assert receiver.missing == []
    assert set(arena.passes.values()) == {1}
    assert len(arena.passes) == layout.block_count
    assert same_weights(layout, bytes(arena.data), data)
    assert receiver.bytes_moved == receiver.bytes_verified == receiver.total_bytes
    assert receiver.bytes_reread == 0
    assert receiver.manifest() == verified(layout, data)


def test_a_corrupt_block_stays_missing():
    """Wrong bytes are named by rank, tensor and block, and the block counts as missing."""
    layout = lay_out_bytes([BLOCK_BYTES, BLOCK_BYTES + 9], rank=3)
    data = random_bytes(layout)
    receiver = Receiver(layout, BytesArena(layout.data_bytes))
    receiver.expect(verified(layout, data))
    wrong = bytearray(block_of(layout, data, 2))
    wrong[4] ^= 8
    with pytest.raises(CorruptBlock, match=r"rank 3, tensor w\.1, block 2") as found:
        receiver.land(2, memoryview(wrong))
    assert found.value.details == {"rank": "3", "tensor": "w.1", "block": "2"}
    assert receiver.missing == [0, 1, 2]
    assert (receiver.bytes_moved, receiver.bytes_reread, receiver.bytes_verified) == (9, 9, 0)
    receiver.land(2, block_of(layout, data, 2))
    assert receiver.missing == [0, 1]


def test_wrong_bytes_over_good_ones(receiver, layout, data):
    """A verified block that is written over with wrong bytes is missing again."""
    for index in range(layout.block_count):
        receiver.land(index, block_of(layout, data, index))
    with pytest.raises(CorruptBlock):
        receiver.land(0, memoryview(bytes(layout.block(0).nbytes)))
    assert not receiver.complete
    assert receiver.missing == [0]
    assert receiver.bytes_verified == receiver.total_bytes - layout.block(0).nbytes
    receiver.land(0, block_of(layout, data, 0))
    assert receiver.complete


def test_a_block_that_comes_twice(receiver, layout, data):
    """Good bytes a second time change nothing but the count of bytes read again."""
    for _ in range(2):
        receiver.land(0, block_of(layout, data, 0))
    assert receiver.blocks_verified == 1
    assert receiver.bytes_reread == layout.block(0).nbytes


@pytest.mark.parametrize("change", [-1, 1])
def test_a_block_of_the_wrong_size(receiver, layout, arena, change):
    """A block that is too short or too long is refused before it touches the arena."""
    wrong = bytes(layout.block(0).nbytes + change)
    with pytest.raises(InvalidRequest, match="block 0: "):
        receiver.land(0, memoryview(wrong))
    assert not arena.passes
    assert 0 in receiver.missing


def test_a_block_before_its_manifest(layout, data, arena):
    """Without knowing what is right, nothing lands."""
    with pytest.raises(InvalidRequest, match="before its manifest"):
        Receiver(layout, arena).land(0, block_of(layout, data, 0))
    assert not arena.passes


def test_taking_up_where_another_ended(receiver, layout, data, arena):
    """A second receiver keeps what the first has verified and reads only the rest."""
    for index in (0, 3, 5):
        receiver.land(index, block_of(layout, data, index))
    second = Receiver(layout, arena, receiver.verified)
    assert second.expect(verified(layout, data)) == 3
    assert second.missing == [i for i in range(layout.block_count) if i not in (0, 3, 5)]
    for index in second.missing:
        second.land(index, block_of(layout, data, index))
    assert second.complete
    assert set(arena.passes.values()) == {1}


def test_other_weights_make_old_blocks_missing(receiver, layout, data):
    """Blocks of weights that nobody wants any more are missing, equal ones are kept."""
    for index in range(layout.block_count):
        receiver.land(index, block_of(layout, data, index))
    changed = bytearray(data)
    changed[layout.block(2).offset] ^= 1
    assert receiver.expect(verified(layout, bytes(changed))) == layout.block_count - 1
    assert receiver.missing == [2]
    assert receiver.bytes_verified == receiver.total_bytes - layout.block(2).nbytes


def test_an_arena_without_bytes():
    """A rank without a single byte is complete as soon as it knows what is right."""
    layout = lay_out_bytes([0])
    receiver = Receiver(layout, BytesArena(0))
    assert not receiver.complete
    receiver.expect(verified(layout, b""))
    assert receiver.complete


def test_what_lies_in_an_arena_is_found(layout, data, arena):
    """Of an arena that nobody knows any more, blocks that match are kept, others are missing."""
    arena.data[: len(data)] = data
    arena.data[layout.block(3).offset] ^= 1
    fresh = Receiver(layout, arena, unknown=True)
    fresh.take_stock()
    assert fresh.expect(verified(layout, data)) == layout.block_count - 1
    assert fresh.missing == [3]
    fresh.land(3, block_of(layout, data, 3))
    assert fresh.complete
    assert fresh.bytes_moved == layout.block(3).nbytes


def test_taking_stock_can_be_ended(layout, data, arena):
    """Whoever ends it early knows as little as before."""
    fresh = Receiver(layout, arena, unknown=True)
    fresh.take_stock(lambda: True)
    assert fresh.unknown
    assert fresh.expect(verified(layout, data)) == 0
