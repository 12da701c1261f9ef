"""Logical tensors, arenas that hold parts of them, and what carries out a plan. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from relay_service.core.copies import Copy
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.holder import Holder
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out


def rows(logical: str, whole: tuple[int, int], first: int, count: int) -> Part:
    """Cuts rows out of a logical tensor."""
    return Part(logical, whole, (first, count), (0, whole[1]))


def columns(logical: str, whole: tuple[int, int], first: int, count: int) -> Part:
    """Cuts columns out of a logical tensor."""
    return Part(logical, whole, (0, whole[0]), (first, count))


def tensor(
    name: str, *parts: Part, dtype: DType = DType.U8, sealed: str = "", row: int = 0
) -> TensorSpec:
    """Declares an arena tensor of these parts; its rows lie `row` elements apart if that is more.

    A sealed one takes a byte more per row, as packed tiles would.
    """
    shape = sum(part.rows[1] for part in parts), parts[0].columns[1] + bool(sealed)
    strides = (max(row, shape[1]), 1)
    return TensorSpec(name, dtype, shape, strides=strides, cut=Cut(parts, sealed))


def holder(
    name: str, units: Mapping[str, Sequence[TensorSpec]], shift: int = 0, rank: int = 0
) -> Holder:
    """Lays out a rank's arena, behind a unit of so many pages that nobody else has."""
    specs = [UnitSpec(unit, tuple(held)) for unit, held in units.items()]
    if shift:
        pages = Cut((rows(f"pages of {name}", (shift * 4096, 1), 0, shift * 4096),))
        specs.insert(
            0, UnitSpec("pages", (TensorSpec("pages", DType.U8, (shift * 4096,), cut=pages),))
        )
    return Holder(name, lay_out(rank, specs))


def contents(one: Holder, salt: str = "") -> bytearray:
    """Cuts logical tensors as a rank holds them; what nobody holds is zero.

    Another salt stands for other weights of the same shapes.
    """
    data = bytearray(one.manifest.data_bytes)
    for entry in (t for unit in one.manifest.units for t in unit.tensors if not t.alias):
        cut, size = entry.cut, entry.dtype.itemsize
        if cut.sealed:
            data[entry.offset : entry.offset + entry.nbytes] = _bytes(
                salt + repr(cut), entry.nbytes
            )
            continue
        at = entry.offset
        for part in cut.parts:
            (top, count), (left, width) = part.rows, part.columns
            logical = _bytes(salt + part.logical, part.whole[0] * part.whole[1] * size)
            for row in range(top, top + count):
                start = (row * part.whole[1] + left) * size
                data[at : at + width * size] = logical[start : start + width * size]
                at += entry.strides[0] * size
    return data


def carry_out(copies: Iterable[Copy], sources: Sequence[bytes], data_bytes: int) -> bytearray:
    """Fills an empty arena; fails where a byte is written twice, or one lies outside."""
    data, written = bytearray(data_bytes), bytearray(data_bytes)
    for copy in copies:
        for run in range(copy.count):
            at = copy.source_offset + run * copy.source_stride
            to = copy.target_offset + run * copy.target_stride
            assert 0 <= at <= at + copy.nbytes <= len(sources[copy.source])
            assert 0 <= to <= to + copy.nbytes <= data_bytes
            assert not any(written[to : to + copy.nbytes]), f"{copy} writes what is there"
            written[to : to + copy.nbytes] = b"\x01" * copy.nbytes
            data[to : to + copy.nbytes] = sources[copy.source][at : at + copy.nbytes]
    return data


def _bytes(name: str, nbytes: int) -> bytes:
    """Returns reproducible bytes, none of which is zero."""
    return random.Random(name).randbytes(nbytes).replace(b"\0", b"\1")  # noqa: S311


# Random models, and random ways to spread them over ranks

Bounds = list[tuple[int, int]]
Matrix = tuple[int, int, list[int]]
"""Number, columns, and the rows of the logical tensors that are fused in it."""

matrices = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
    min_size=1, max_size=4,
).map(lambda drawn: [(number, *one) for number, one in enumerate(drawn)])  # fmt: skip


@st.composite
def bounds(draw, size: int, parts: int) -> Bounds:
    """Cuts so many things into so many runs, anywhere; some may be empty."""
    inner = sorted(draw(st.integers(0, size)) for _ in range(parts - 1))
    return [(first, end - first) for first, end in pairwise([0, *inner, size])]


@st.composite
def placements(draw, model: list[Matrix], most: int = 3) -> list[Holder]:
    """Ranks in a grid of at most so many by so many.

    Each holds its rows and columns of every matrix, or all of one; matrices lie in any order,
    in few units or many, their rows side by side or apart.
    """
    bands, stripes = draw(st.integers(1, most)), draw(st.integers(1, most))
    ranks: list[dict] = [{} for _ in range(bands * stripes)]
    for number, width, heights in draw(st.permutations(model)):
        unit, row = f"unit.{draw(st.integers(0, 1))}", draw(st.sampled_from([0, 9]))
        shared, dtype = draw(st.booleans()), [DType.U8, DType.BF16, DType.F32][number % 3]
        across = draw(bounds(width, stripes))
        down = [draw(bounds(height, bands)) for height in heights]
        for rank, units in enumerate(ranks):
            band, stripe = divmod(rank, stripes)
            parts = [
                Part(
                    f"{number}.{n}", (height, width),
                    (0, height) if shared else down[n][band],
                    (0, width) if shared else across[stripe],
                )
                for n, height in enumerate(heights)
            ]  # fmt: skip
            units.setdefault(unit, []).append(tensor(f"m{number}", *parts, dtype=dtype, row=row))
    return [holder(f"rank {n}", units, rank=n) for n, units in enumerate(ranks)]
