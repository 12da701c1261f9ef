"""What of a copy one block of its source holds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.copies import Copy, within

MOST_BYTES = 200


@st.composite
def copies(draw) -> Copy:
    """Any copy within a few bytes; runs lie side by side or apart."""
    nbytes, count = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    gaps = st.integers(nbytes, nbytes + 5)
    strides = (draw(gaps), draw(gaps)) if count > 1 else (0, 0)
    return Copy(0, draw(st.integers(0, 40)), draw(st.integers(0, 40)), nbytes, count, *strides)


def moves(copy: Copy, start: int = 0) -> list[tuple[int, int]]:
    """Returns where each byte comes from and goes to."""
    return [
        (start + copy.source_offset + run * copy.source_stride + byte,
         copy.target_offset + run * copy.target_stride + byte)
        for run in range(copy.count)
        for byte in range(copy.nbytes)
    ]  # fmt: skip


@given(copies(), st.lists(st.integers(0, MOST_BYTES), max_size=5))
def test_blocks_hold_every_byte_of_a_copy_once(copy, cuts):
    """Whatever the blocks, together they move what the copy moves, each at most three copies."""
    bounds = [0, *sorted(cuts), MOST_BYTES]
    found = []
    for start, end in pairwise(bounds):
        pieces = list(within(copy, start, end))
        assert len(pieces) <= 3
        for piece in pieces:
            assert piece.source_offset >= 0
            assert start + piece.source_offset + piece.source_span <= end
            found += moves(piece, start)
    assert sorted(found) == sorted(moves(copy))


@given(copies())
def test_spans(copy):
    """A span reaches from the first to the last byte, on both sides."""
    sources, targets = zip(*moves(copy), strict=True)
    assert copy.source_span == max(sources) - min(sources) + 1
    assert copy.target_span == max(targets) - min(targets) + 1
