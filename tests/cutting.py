"""Logical tensors, arenas that hold parts of them, and what carries out a plan. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

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


def holder(name: str, units: Mapping[str, Sequence[TensorSpec]], shift: int = 0) -> Holder:
    """Lays out a rank's arena, behind a unit of so many pages that nobody else has."""
    specs = [UnitSpec(unit, tuple(held)) for unit, held in units.items()]
    if shift:
        pages = Cut((rows(f"pages of {name}", (shift * 4096, 1), 0, shift * 4096),))
        specs.insert(
            0, UnitSpec("pages", (TensorSpec("pages", DType.U8, (shift * 4096,), cut=pages),))
        )
    return Holder(name, lay_out(0, specs))


def contents(one: Holder) -> bytearray:
    """Cuts logical tensors as a rank holds them; what nobody holds is zero."""
    data = bytearray(one.manifest.data_bytes)
    for entry in (t for unit in one.manifest.units for t in unit.tensors if not t.alias):
        cut, size = entry.cut, entry.dtype.itemsize
        if cut.sealed:
            data[entry.offset : entry.offset + entry.nbytes] = _bytes(repr(cut), entry.nbytes)
            continue
        at = entry.offset
        for part in cut.parts:
            (top, count), (left, width) = part.rows, part.columns
            logical = _bytes(part.logical, part.whole[0] * part.whole[1] * size)
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
    return bytes(random.Random(name).choices(range(1, 256), k=nbytes))  # noqa: S311
