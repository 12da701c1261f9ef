"""Lays tensors out in an arena, and checks layouts that came from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from relay_service.core.cut import UNSAID, Cut
from relay_service.core.dtypes import DType
from relay_service.core.manifest import (
    DIGEST_BYTES,
    TENSOR_ALIGN,
    UNIT_ALIGN,
    Manifest,
    TensorEntry,
    Unit,
)
from relay_service.errors import ManifestError

KINDS = ("parameter", "buffer", "scale", "derived")
MAX_UNITS = 1 << 20
MAX_TENSORS = 1 << 22
MAX_DIMENSIONS = 8
MAX_PARTS = 1024
MAX_ALL_PARTS = 1 << 20
MAX_NAME_CHARS = 256
MAX_DATA_BYTES = 1 << 44


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that an arena shall hold."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: str = "parameter"
    logical: str = ""
    alias: str = ""
    """Name of an earlier tensor of the same unit or arena to share bytes with."""
    strides: tuple[int, ...] = ()
    """In elements; empty for a contiguous tensor."""
    cut: Cut = UNSAID
    """Which parts of logical tensors it holds."""


class UnitSpec(msgspec.Struct, frozen=True):
    """A unit that an arena shall hold."""

    name: str
    tensors: tuple[TensorSpec, ...]


def lay_out(rank: int, units: Sequence[UnitSpec]) -> Manifest:
    """Places every tensor: units on pages, tensors on cache lines.

    Raises `ManifestError` for a name that stands twice or an unknown alias.
    """
    placed: dict[str, TensorEntry] = {}
    result, cursor = [], 0
    for unit in units:
        start = cursor = _align(cursor, UNIT_ALIGN)
        entries = []
        for spec in unit.tensors:
            if spec.name in placed:
                raise ManifestError(f"tensor {spec.name} stands twice")
            entry = _place(spec, _align(cursor, TENSOR_ALIGN), placed)
            if not entry.alias:
                cursor = entry.offset + entry.nbytes
            placed[spec.name] = entry
            entries.append(entry)
        result.append(Unit(unit.name, start, cursor - start, tuple(entries)))
    manifest = Manifest(rank, _align(cursor, UNIT_ALIGN), tuple(result))
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Refuses a manifest that contradicts itself, whoever sent it.

    Raises `ManifestError` naming the unit or tensor.
    """
    if not 0 <= manifest.data_bytes <= MAX_DATA_BYTES:
        raise ManifestError(f"data_bytes {manifest.data_bytes} is not in 0..{MAX_DATA_BYTES}")
    if len(manifest.units) > MAX_UNITS:
        raise ManifestError(f"{len(manifest.units)} units, at most {MAX_UNITS} are allowed")
    if sum(len(unit.tensors) for unit in manifest.units) > MAX_TENSORS:
        raise ManifestError(f"more than {MAX_TENSORS} tensors")
    if sum(len(t.cut.parts) for unit in manifest.units for t in unit.tensors) > MAX_ALL_PARTS:
        raise ManifestError(f"more than {MAX_ALL_PARTS} parts of tensors")
    _check_unique("unit", (unit.name for unit in manifest.units))
    _check_unique("tensor", (t.name for unit in manifest.units for t in unit.tensors))
    owners = {t.name: t for unit in manifest.units for t in unit.tensors if not t.alias}
    end = 0
    for unit in manifest.units:
        if unit.offset < end or unit.offset % UNIT_ALIGN or unit.nbytes < 0:
            raise ManifestError(f"unit {unit.name}: offset {unit.offset} overlaps or is unaligned")
        end = unit.offset + unit.nbytes
        if end > manifest.data_bytes:
            raise ManifestError(f"unit {unit.name}: ends at {end} of {manifest.data_bytes} bytes")
        _check_digests(unit)
        _check_tensors(unit, owners)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns row-major strides in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def span_bytes(dtype: DType, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the bytes from the first to the last element, both included."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize


def gaps(manifest: Manifest) -> Iterator[tuple[int, int]]:
    """Yields offset and size of what elements may leave empty: it is zero, and has digests too.

    That is what lies between tensors, and all of a tensor whose rows lie apart.
    """
    for unit in manifest.units:
        end = unit.offset
        for tensor in (one for one in unit.tensors if not one.alias):
            if tensor.offset > end:
                yield end, tensor.offset - end
            end = tensor.offset + tensor.nbytes
            if tensor.nbytes > math.prod(tensor.shape) * tensor.dtype.itemsize:
                yield tensor.offset, tensor.nbytes
        if unit.offset + unit.nbytes > end:
            yield end, unit.offset + unit.nbytes - end


def _place(spec: TensorSpec, offset: int, placed: dict[str, TensorEntry]) -> TensorEntry:
    strides = spec.strides or contiguous_strides(spec.shape)
    if spec.alias:
        if spec.alias not in placed:
            raise ManifestError(f"tensor {spec.name} is an alias of unknown {spec.alias}")
        offset = placed[spec.alias].offset
    nbytes = span_bytes(spec.dtype, spec.shape, strides)
    return TensorEntry(
        spec.name, spec.kind, spec.dtype, spec.shape, strides, offset, nbytes,
        spec.logical, spec.alias, spec.cut,
    )  # fmt: skip


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or "/" in name:
            raise ManifestError(f"{what} name {name[:64]!r} is not allowed")
        if name in seen:
            raise ManifestError(f"{what} {name} stands twice")
        seen.add(name)


def _check_digests(unit: Unit) -> None:
    if unit.digests and len(unit.digests) != unit.block_count:
        raise ManifestError(
            f"unit {unit.name}: {len(unit.digests)} digests for {unit.block_count} blocks"
        )
    if any(len(digest) != DIGEST_BYTES for digest in unit.digests):
        raise ManifestError(f"unit {unit.name}: a digest is not {DIGEST_BYTES} bytes long")


def _check_tensors(unit: Unit, owners: dict[str, TensorEntry]) -> None:
    end = unit.offset
    for tensor in unit.tensors:
        _check_shape(tensor)
        if tensor.alias:
            owner = owners.get(tensor.alias)
            if owner is None or not _within(tensor, owner.offset, owner.nbytes):
                raise ManifestError(f"tensor {tensor.name}: not within {tensor.alias[:64]!r}")
            continue
        if tensor.offset < end or not _within(tensor, unit.offset, unit.nbytes):
            raise ManifestError(f"tensor {tensor.name}: extent overlaps or leaves {unit.name}")
        end = tensor.offset + tensor.nbytes


def _check_shape(tensor: TensorEntry) -> None:
    sizes = (*tensor.shape, *tensor.strides, tensor.offset, tensor.nbytes)
    if tensor.kind not in KINDS:
        raise ManifestError(f"tensor {tensor.name}: unknown kind {tensor.kind[:64]!r}")
    if len(tensor.shape) > MAX_DIMENSIONS or len(tensor.shape) != len(tensor.strides):
        raise ManifestError(f"tensor {tensor.name}: {len(tensor.shape)} dimensions")
    if any(not 0 <= size <= MAX_DATA_BYTES for size in sizes):
        raise ManifestError(f"tensor {tensor.name}: a size is out of range")
    if len(tensor.cut.parts) > MAX_PARTS:
        raise ManifestError(f"tensor {tensor.name}: more than {MAX_PARTS} parts")
    for said in (tensor.cut.sealed, *(part.logical for part in tensor.cut.parts)):
        if len(said) > MAX_NAME_CHARS or not said.isprintable():
            raise ManifestError(f"tensor {tensor.name}: {said[:64]!r} is not allowed")
    if fault := tensor.cut.fault(tensor.shape, tensor.strides):
        raise ManifestError(f"tensor {tensor.name}: {fault}")
    expected = span_bytes(tensor.dtype, tensor.shape, tensor.strides)
    if tensor.nbytes != expected:
        raise ManifestError(f"tensor {tensor.name}: {tensor.nbytes} bytes, shape needs {expected}")


def _within(tensor: TensorEntry, offset: int, nbytes: int) -> bool:
    return offset <= tensor.offset and tensor.offset + tensor.nbytes <= offset + nbytes


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
