"""Blocks that are the same bytes: which of them are read, and which are copied."""

import asyncio
from contextlib import contextmanager

import pytest
from fakes import (
    BytesArena,
    FakeFleet,
    FakeSource,
    FakeTransport,
    instance,
    lay_out_bytes,
    same_weights,
    verified,
)
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.beside import Beside
from relay_service.core.digests import block_digest
from relay_service.core.format import Placement
from relay_service.core.match import Target
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions
from relay_service.core.reading import Copied
from relay_service.core.receiver import Receiver
from relay_service.errors import CorruptBlock, EpochChanged

SIZE = 64
KINDS = 5
"""Different contents that blocks have; none of them is what an empty arena holds."""

rank = st.lists(st.integers(1, KINDS), min_size=4, max_size=4)
ranks = st.lists(rank, min_size=1, max_size=3)


def laid_out(kinds: list[list[int]]):
    """Returns layouts and contents of ranks whose blocks are of these kinds."""
    layouts = [lay_out_bytes([SIZE] * len(one), rank) for rank, one in enumerate(kinds)]
    contents = []
    for layout, one in zip(layouts, kinds, strict=True):
        data = bytearray(layout.data_bytes)
        for index, kind in enumerate(one):
            offset = layout.block(index).offset
            data[offset : offset + SIZE] = bytes([kind]) * SIZE
        contents.append(bytes(data))
    return layouts, contents


class Filling:
    """A pull of blocks of these kinds into arenas, beside others that serve where `serve`."""

    def __init__(self, kinds, serve=None) -> None:
        self.layouts, self.contents = laid_out(kinds)
        self.arenas = [BytesArena(layout.data_bytes) for layout in self.layouts]
        self.lends = self.lend
        beside = [None] * len(kinds)
        if serve:
            held = laid_out(serve)[1]
            pairs = zip(map(verified, self.layouts, held), held, strict=True)
            beside = [Beside(m, lambda d=d: self.lends(d)) for m, d in pairs]
        self.receivers = [
            Receiver(layout, arena, beside=one)
            for layout, arena, one in zip(self.layouts, self.arenas, beside, strict=True)
        ]
        self.source = FakeSource("seed", self.layouts, self.contents)
        self.puller = Puller(
            Target("target", instance().format, Placement(len(kinds))), self.receivers,
            FakeFleet(self.source.record), [FakeTransport(self.source)], PullOptions(),
        )  # fmt: skip

    @contextmanager
    def lend(self, data):
        """Lends an arena that holds this."""
        arena = BytesArena(len(data))
        arena.data[:] = data
        yield arena

    def fill(self):
        """Pulls to the end."""
        return asyncio.run(self.puller.run())

    def assert_filled(self, serve=None) -> None:
        """Checks every block: it lies in the arena, or is what serves at that place."""
        beside = laid_out(serve)[1] if serve else self.contents
        for layout, arena, wanted, held in zip(
            self.layouts, self.arenas, self.contents, beside, strict=True
        ):
            for block in map(layout.block, range(layout.block_count)):
                part = slice(block.offset, block.offset + block.nbytes)
                assert wanted[part] in (bytes(arena.data[part]), held[part] if serve else b"")
        assert all(receiver.complete for receiver in self.receivers)

    @property
    def kinds_read(self) -> int:
        """Blocks that came."""
        return len(self.source.reads)


@given(ranks)
def test_each_block_comes_once(kinds):
    """Whatever is the same as what, over all ranks, all lands and each content comes once."""
    filling = Filling(kinds)
    filling.fill()
    for layout, arena, data in zip(filling.layouts, filling.arenas, filling.contents, strict=True):
        assert same_weights(layout, bytes(arena.data), data)
        assert set(arena.passes.values()) == {1}
    different = len({kind for one in kinds for kind in one})
    assert filling.kinds_read == different
    assert filling.puller.bytes_moved == different * SIZE
    assert filling.puller.bytes_copied == sum(map(len, kinds)) * SIZE - different * SIZE


@given(ranks, st.data())
def test_what_landed_before(kinds, data):
    """What an earlier pull has left is copied to wherever it is missing."""
    filling = Filling(kinds)
    places = [(rank, index) for rank, one in enumerate(kinds) for index in range(len(one))]
    there = data.draw(st.lists(st.sampled_from(places), unique=True))
    for rank, index in there:
        receiver = filling.receivers[rank]
        receiver.expect(filling.source.manifests[rank])
        block = receiver.layout.block(index)
        receiver.land(index, memoryview(filling.contents[rank])[block.offset :][: block.nbytes])
    filling.fill()
    filling.assert_filled()
    wanted = {kind for one in kinds for kind in one}
    assert filling.kinds_read == len(wanted - {kinds[rank][index] for rank, index in there})


@given(st.lists(st.tuples(rank, rank), min_size=1, max_size=2))
def test_what_serves_beside(both):
    """What serves anywhere is copied from there, and in its own place not even that."""
    kinds, serve = map(list, zip(*both, strict=True))
    filling = Filling(kinds, serve)
    filling.fill()
    filling.assert_filled(serve)
    there = {kind for one in serve for kind in one}
    assert filling.kinds_read == len({kind for one in kinds for kind in one} - there)
    for arena, new, old in zip(filling.arenas, kinds, serve, strict=True):
        assert len(arena.passes) == sum(a != b for a, b in zip(new, old, strict=True))


def test_other_weights_serve_by_now():
    """What is not beside any more is read."""
    filling = Filling([[1, 2, 1, 1]], [[2, 2, 2, 3]])

    def gone(_):
        raise EpochChanged("it was updated")

    filling.lends = gone
    filling.fill()
    filling.assert_filled([[2, 2, 2, 3]])
    filling = Filling([[1, 3, 3, 1]], [[3, 2, 2, 1]])
    filling.lends = gone
    filling.fill()
    filling.assert_filled([[3, 2, 2, 1]])
    assert filling.source.reads == [0, 1, 2]


@pytest.mark.parametrize("place", [(0, 2), (1, 0)])
def test_a_copy_that_goes_wrong(place):
    """A copy whose digest is wrong where it lands counts for nothing, and is read after all."""
    filling = Filling([[1, 2, 1, 1], [1, 3, 1, 2]])
    rank, index = place
    arena, layout = filling.arenas[rank], filling.layouts[rank]
    land, wrong = arena.land, [bytes(SIZE)]

    def land_wrong(offset, data):
        spoilt = offset == layout.block(index).offset and bool(wrong)
        return land(offset, memoryview(wrong.pop()) if spoilt else data)

    arena.land = land_wrong
    filling.fill()
    filling.assert_filled()
    assert filling.kinds_read == 4
    assert filling.puller.bytes_moved == 4 * SIZE
    assert filling.puller.bytes_copied == 4 * SIZE


def test_a_block_that_another_one_receives():
    """What comes while another one receives it in its place is not verified, and not copied."""
    filling = Filling([[1, 2, 1]])
    way = Copied(filling.source.manifests, filling.receivers)
    with way.place(0, [0]) as place:
        way.land(0, 0, memoryview(bytes(SIZE)))
        place.memory[0][:] = bytes([1]) * SIZE
        place.landed([block_digest(place.memory[0])])
    assert way.missing(0) == [1]
    assert filling.receivers[0].missing == [1]


def test_a_wrong_block_is_copied_nowhere():
    """A block that came with wrong bytes stays missing, and so do all that are the same."""
    filling = Filling([[1, 1, 2, 1]])
    filling.source.corrupt[0] = 1
    filling.fill()
    filling.assert_filled()
    assert filling.source.reads == [0, 0, 2]
    filling = Filling([[1, 1, 2, 1]])
    filling.source.corrupt[0] = 100
    with pytest.raises(CorruptBlock):
        filling.fill()
    assert [bool(one) for one in filling.receivers[0].verified] == [False] * 4
