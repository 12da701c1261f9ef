"""Rounding to bfloat16 against torch's."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_service.checkpoint.floats import encode, encode_in_chunks, round_to_bfloat16


def rounded_by_torch(values: np.ndarray) -> np.ndarray:
    """Returns the bits that torch rounds to."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_bits(bits):
    """Every float32, subnormal or infinite too, rounds as in torch; a NaN stays one."""
    values = np.array(bits, np.uint32).view(np.float32)
    ours, theirs = round_to_bfloat16(values), rounded_by_torch(values)
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert all((ours[nan] & 0x7FFF) > 0x7F80)


@given(st.integers(0, 2**16 - 1))
def test_ties_go_to_even(upper):
    """Half of the last place rounds to the even neighbour, as in torch."""
    values = np.array([upper << 16 | 0x8000], np.uint32).view(np.float32)
    if np.isnan(values[0]):
        return
    assert round_to_bfloat16(values)[0] == rounded_by_torch(values)[0]
    assert round_to_bfloat16(values)[0] % 2 == 0


def test_edges():
    """Infinities, zeros and the overflow to infinity keep their sign; NaN is quiet."""
    values = np.array([np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, np.nan], np.float32)
    expected = [0x7F80, 0xFF80, 0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0]
    assert round_to_bfloat16(values).tolist() == expected


def test_chunks_join_to_the_whole():
    """Encoding in pieces gives the same bytes, in every dtype."""
    values = np.random.default_rng(0).standard_normal((700, 900)).astype(np.float32)
    for dtype in ("float32", "bfloat16", "float16"):
        pieces = [piece.tobytes() for piece in encode_in_chunks(values, dtype)]
        assert len(pieces) > 1
        assert b"".join(pieces) == encode(values, dtype).tobytes()
