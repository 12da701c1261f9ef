"""A matrix is processed some rows at a time: how many decides nothing but what memory it takes."""

import pytest
import torch
from format_cases import CASES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_service.device.formats.block_scaled import BlockScaled, Stacked
from engine_service.device.formats.layouts import LAYOUTS
from engine_service.device.formats.linear import KERNELS
from engine_service.device.torch_dtypes import MANIFEST_DTYPES, TORCH_DTYPES

BANDED = [one for one in CASES if one.values[0] in {"plain", "packed", "int8", "int4"}]
ALL = 1 << 20
sizes = st.tuples(st.integers(1, 400), st.integers(1, 200))


def _processed(name, dtype, weight, *whole, band_rows):
    """Returns the bytes that a matrix becomes in memory that was used before."""
    declared = LAYOUTS[name].stored(MANIFEST_DTYPES[dtype], *weight.shape)
    stored = [torch.ones(one.shape).to(TORCH_DTYPES[one.dtype]) for one in declared]
    KERNELS[name].process(weight, stored, *whole, band_rows=band_rows)
    return [one.view(torch.uint8) for one in stored]


def _equal(these, those):
    return all(torch.equal(*pair) for pair in zip(these, those, strict=True))


@pytest.mark.parametrize(("name", "dtype"), BANDED)
@settings(deadline=None)
@given(sizes, st.integers(1, 6), st.sampled_from([torch.float32, torch.bfloat16]))
@example((321, 96), 1, torch.float32)
@example((320, 96), 1, torch.bfloat16)
@torch.inference_mode()
def test_bands_of_any_size_give_the_bytes_of_the_whole(name, dtype, size, tiles, read):
    """Also where the last is smaller than a tile, or all are whole, and whatever type was read."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(read)
    before = weight.clone()
    whole = _processed(name, dtype, weight, band_rows=ALL)
    assert _equal(_processed(name, dtype, weight, band_rows=64 * tiles), whole)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(("name", "dtype"), [one for one in BANDED if one.values[0] == "int8"])
@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 6))
@example(321, 1)
@torch.inference_mode()
def test_a_band_of_some_columns_is_scaled_by_its_own_rows(name, dtype, rows, tiles):
    """The other columns, which lie on other ranks, are those of the same rows."""
    whole = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    part = whole[:, 32:]
    expected = _processed(name, dtype, part, whole, band_rows=ALL)
    assert torch.equal(expected[1].view(torch.float32), whole.float().abs().amax(1) / 127)
    assert _equal(_processed(name, dtype, part, whole, band_rows=64 * tiles), expected)


@st.composite
def _parts(draw, columns):
    """A part of a matrix of a checkpoint, and what it stands for in float32."""
    rows, kind = draw(st.integers(1, 200)), draw(st.sampled_from(["bfloat16", "float32", "blocks"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    if kind != "blocks":
        part = torch.randn(rows, columns, generator=generator).to(getattr(torch, kind))
        return part, part.float()
    row, column = draw(st.integers(0, 300)), draw(st.integers(0, 300))
    numbers = torch.randn(row + rows, column + columns, generator=generator)
    scales = torch.rand([-(-size // 128) for size in numbers.shape], generator=generator)
    values = numbers.to(torch.float8_e4m3fn)[row:, column:]
    by_row = scales.repeat_interleave(128, 0)[row : row + rows]
    factors = by_row.repeat_interleave(128, 1)[:, column : column + columns]
    return BlockScaled(values, scales, (row, column)), values.float() * factors


@settings(deadline=None)
@given(st.data())
def test_rows_of_stacked_matrices_are_those_of_one(data):
    """Wherever a run of rows begins and ends, over seams and parts of any type; columns too."""
    columns = data.draw(st.integers(2, 200))
    pairs = data.draw(st.lists(_parts(columns), min_size=1, max_size=3))
    stacked, expected = Stacked([part for part, _ in pairs]), torch.cat([one for _, one in pairs])
    assert stacked.shape == expected.shape
    first = data.draw(st.integers(0, len(expected) - 1))
    end = data.draw(st.integers(first + 1, len(expected) + 20))
    assert torch.equal(stacked[first:end].float(), expected[first:end])
    left = data.draw(st.integers(0, columns - 1))
    width = data.draw(st.integers(1, columns - left))
    cut = stacked.of_columns(left, width)
    assert torch.equal(cut[:].float(), expected[:, left : left + width])
