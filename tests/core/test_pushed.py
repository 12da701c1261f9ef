"""Every byte of a pushed tensor comes once, in whatever order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.pushed import Arrivals
from engine_service.core.update_messages import PushedHeader, StagePiece
from engine_service.errors import InvalidRequest


def piece(begin: int, end: int, tensor: int = 0) -> StagePiece:
    """Returns a piece of a tensor."""
    return StagePiece(tensor, begin, bytes(end - begin))


@given(st.sets(st.integers(1, 59)), st.randoms(use_true_random=False), st.data())
def test_any_order(cuts, random, data):
    """However a tensor is cut, all pieces make it whole, and all but one do not."""
    edges = [0, *sorted(cuts), 60]
    parts = list(itertools.pairwise(edges))
    random.shuffle(parts)
    missing = data.draw(st.sampled_from(parts))
    arrivals = Arrivals([PushedHeader("w", "U8", (60,)), PushedHeader("empty", "F32", (0, 3))])
    for part in parts:
        if part != missing:
            arrivals.add(piece(*part))
    with pytest.raises(InvalidRequest, match=rf"missing are w \({missing[1] - missing[0]} of 60"):
        arrivals.check_complete()
    arrivals.add(piece(*missing))
    arrivals.check_complete()
    assert arrivals._covered[0].complete, "what is in order takes no memory"


@given(st.sets(st.integers(1, 59)), st.integers(0, 59), st.integers(1, 60))
def test_nothing_twice(cuts, begin, length):
    """A piece that overlaps what has come is refused, wherever it lies."""
    edges = [0, *sorted(cuts), 60]
    parts = list(itertools.pairwise(edges))[::2]
    arrivals = Arrivals([PushedHeader("w", "U8", (60,))])
    for part in parts:
        arrivals.add(piece(*part))
    end = min(begin + length, 60)
    if any(first < end and begin < last for first, last in parts):
        with pytest.raises(InvalidRequest, match=f"bytes {begin} to {end} came twice"):
            arrivals.add(piece(begin, end))
    else:
        arrivals.add(piece(begin, end))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (piece(0, 4, tensor=1), "no tensor 1"),
        (piece(0, 4, tensor=-1), "no tensor -1"),
        (piece(2, 4), "no whole elements"),
        (piece(0, 6), "no whole elements"),
        (piece(4, 16), "no whole elements"),
        (piece(0, 0), "no whole elements"),
        (StagePiece(0, -4, b"1234"), "no whole elements"),
    ],
)
def test_pieces_that_cannot_be(found, words):
    """Beyond the tensor, or through an element."""
    arrivals = Arrivals([PushedHeader("w", "F32", (3,))])
    with pytest.raises(InvalidRequest, match=words):
        arrivals.add(found)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "0 tensors"),
        ([PushedHeader("w", "F33", (1,))], "type 'F33' is unknown"),
        ([PushedHeader("w", "F32", (-1,))], "cannot be"),
        ([PushedHeader("w", "F32", (1,), b"x")], "digest cannot be"),
        ([PushedHeader("w", "F32", (1 << 40, 1 << 40))], "cannot be"),
        ([PushedHeader("", "F32", (1,))], "cannot be"),
        ([PushedHeader("w", "F32", (1,)), PushedHeader("w", "F32", (1,))], "w stands twice"),
    ],
)
def test_tensors_that_cannot_be(tensors, words):
    """They are refused before a byte comes."""
    with pytest.raises(InvalidRequest, match=words):
        Arrivals(tensors)
