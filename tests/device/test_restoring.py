"""A rank copies out of its former arena what is still right, and nothing else."""

import os

import pytest
from tiny_llama import start_message

from engine_service.core.messages import Restored
from engine_service.device.plan import plan
from engine_service.device.rank import Rank
from engine_service.device.restoring import restore
from engine_service.errors import WrongState
from relay_service.core.manifest import Manifest
from relay_service.memory.host import HostArena, seal


@pytest.fixture
def former(tied):
    """A rank that has served, sealed as it was."""
    rank = Rank(start_message(tied))
    rank.load(tied, lambda _done, _total: None)
    return rank


def _restore(planned, former, manifest: Manifest | None = None) -> Restored:
    fd = os.dup(former.arena.descriptors[0])
    try:
        return restore(planned, fd, manifest or former.arena.digested(), lambda *_: None)
    finally:
        os.close(fd)


def _bytes(arena: HostArena) -> bytes:
    return bytes(arena.view(0, arena.data_bytes))


def test_all_that_is_right_is_copied(tied, former):
    """A fresh arena holds the same then, at an address and in memory of its own."""
    planned = plan(start_message(tied))
    blocks = planned.manifest.block_count
    assert _restore(planned, former) == Restored(blocks, blocks)
    assert _bytes(planned.memory.mapping) == bytes(
        former.arena.view(0, former.arena.manifest.data_bytes)
    )
    assert planned.memory.mapping.address != former.arena.address


def test_what_is_wrong_is_zero_and_can_be_loaded(tied, former):
    """A block that does not match leaves nothing, and a load ends as one of a fresh arena."""
    manifest = former.arena.digested()
    block = manifest.block(manifest.block_count - 1)
    former.arena.view(block.offset, 1)[0] ^= 1
    start = start_message(tied)
    planned = plan(start)
    assert _restore(planned, former, manifest) == Restored(block.index, block.index + 1)
    assert not any(planned.memory.mapping.view(block.offset, block.nbytes))
    assert any(planned.memory.mapping.view(0, block.offset))
    rank = Rank(start, planned=planned)
    rank.load(tied, lambda _done, _total: None)
    assert rank.arena.digested() == manifest


def test_a_commit_that_was_cut_short(tied, former):
    """Whatever the header says, blocks of neither weights do not count, and the others do."""
    manifest = former.arena.digested()
    former.arena.begin()
    former.arena.view(manifest.block(0).offset, 1)[0] ^= 1
    planned = plan(start_message(tied))
    assert _restore(planned, former, manifest) == Restored(
        manifest.block_count - 1, manifest.block_count
    )
    assert planned.memory.mapping.sequence == 0


def test_an_arena_that_serves_is_left_alone(tied, former):
    """Nothing is copied into weights that are sealed."""
    planned = plan(start_message(tied))
    seal(planned.memory.fd)
    with pytest.raises(WrongState, match="only a fresh arena"):
        _restore(planned, former)


def test_another_layout_is_refused(tied, former):
    """A former arena that lies otherwise is not looked at."""
    manifest = former.arena.digested()
    other = Manifest(manifest.rank, manifest.data_bytes, manifest.units[:-1])
    planned = plan(start_message(tied))
    with pytest.raises(WrongState, match="the former arena lies otherwise: units"):
        _restore(planned, former, other)
    assert not any(_bytes(planned.memory.mapping))
