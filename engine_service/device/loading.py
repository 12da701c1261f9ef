"""Fills an arena from a checkpoint folder, digesting each block as it is completed.

A unit whose bytes are the checkpoint's is filled in ascending order, a piece of one block at
a time: read (or converted) straight into the arena, then digested while it is still in
cache. A unit with matrices of another format is filled tensor by tensor: one matrix is
read, processed into the arena and freed, and the unit is digested at its end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from engine_service.device.arena import Arena
from engine_service.device.checkpoint import StoredTensor, open_checkpoint
from engine_service.device.dtypes import stored_dtype
from engine_service.device.fitting import check_filled, check_fit, listed
from engine_service.device.formats.block_scaled import BlockScaled, as_plain, fused
from engine_service.device.formats.linear import Linear
from engine_service.device.parts import Part, as_tensor, parts_of
from engine_service.device.sharding import Slice
from engine_service.device.torch_dtypes import TORCH_DTYPES
from engine_service.errors import CheckpointError
from relay_service.core.dtypes import DType
from relay_service.core.manifest import BLOCK_BYTES, Manifest, TensorEntry, Unit, block_digest

_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
Digest = Callable[[memoryview], bytes]


def load(
    arena: Arena,
    folder: Path,
    slices: Mapping[str, Slice],
    computed: Mapping[str, Tensor],
    matrices: Iterable[Linear] = (),
    *,
    unread: Callable[[str], bool] = lambda _name: False,
    progress: Progress = lambda _done, _total: None,
    digest: Digest = block_digest,
) -> tuple[Manifest, int]:
    """Fills an arena.

    Args:
        arena: Where to, all zero; untouched when the checkpoint does not fit.
        folder: A checkpoint folder.
        slices: What to take of every checkpoint tensor that the model needs, by name.
        computed: Contents of the arena's tensors that no checkpoint holds, by name.
        matrices: Of the model on this arena.
        unread: Says of a checkpoint tensor whether it may be there and is not read.
        progress: Called with bytes read so far and in all.
        digest: Digests one block.

    Returns:
        The manifest with digests, and the bytes read.

    Raises:
        CheckpointError: The folder is unsound or isn't what the model needs.
        ArenaError: A tensor holds numbers of a format, and none of `matrices` is there to fill it.
    """
    stored = {name: one for name, one in open_checkpoint(folder).items() if not unread(name)}
    check_fit(stored, {name: piece.whole for name, piece in slices.items()})
    parts = parts_of(stored, slices)
    scaled = any(part.scales for part in parts.values())
    filled = [one for one in matrices if scaled or not one.layout.streams]
    processed = {name: one for one in filled for name in one.names}
    check_filled(arena.manifest, processed)
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(path.open("rb", buffering=0)).fileno()
            for path in {one.path for part in parts.values() for one in part.held}
        }
        total = sum(part.nbytes for part in parts.values())
        filling = _Filling(
            arena, parts, files, computed, processed, lambda done: progress(done, total)
        )
        digests = [found for unit in arena.manifest.units for found in filling.fill(unit, digest)]
    arena.flush()
    if filling.rounded_anew:
        _log.warning("not the checkpoint's own float8: %s", listed(filling.rounded_anew))
    return arena.manifest.with_digests(digests), filling.bytes_read


class _Filling:
    """One pass over an arena."""

    def __init__(
        self, arena: Arena, parts: Mapping[str, Part], files: Mapping[Path, int],
        computed: Mapping[str, Tensor], processed: Mapping[str, Linear],
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._arena = arena
        self._parts = parts
        self._files = files
        self._computed = computed
        self._processed = processed
        self._progress = progress
        self._start = 0
        self._block = memoryview(b"")
        self.bytes_read = 0
        self.rounded_anew: list[str] = []  # matrices whose float8 numbers could not be kept

    def fill(self, unit: Unit, digest: Digest) -> Iterator[bytes]:
        """Fills a unit; yields each block's digest, in order."""
        if any(entry.name in self._processed for entry in unit.tensors):
            return self._fill_tensors(unit, digest)
        return self._fill_blocks(unit, digest)

    def _fill_tensors(self, unit: Unit, digest: Digest) -> Iterator[bytes]:
        for entry in unit.tensors:
            matrix = self._processed.get(entry.name)
            if entry.alias or (matrix and entry.name != matrix.names[0]):
                continue  # it comes with another one
            if not entry.logical:
                self._arena.tensors[entry.name].copy_(self._computed[entry.name])
            elif matrix:
                self._fill_matrix(entry, matrix)
            else:
                self._arena.tensors[entry.name].copy_(as_plain(self._whole(entry)))
        self._arena.flush()
        for start in range(unit.offset, unit.offset + unit.nbytes, BLOCK_BYTES):
            nbytes = min(BLOCK_BYTES, unit.offset + unit.nbytes - start)
            yield digest(self._arena.view(start, nbytes))

    def _fill_matrix(self, entry: TensorEntry, matrix: Linear) -> None:
        parts = [self._parts[name] for name in entry.logical.split("+")]
        kept = matrix.fill(self._whole(entry), parts[0].slice.kept)
        scaled = any(part.scales for part in parts)
        if matrix.layout.quantised and scaled and not kept:
            self.rounded_anew.append(entry.name)

    def _whole(self, entry: TensorEntry) -> Tensor | BlockScaled:
        return fused([self._matrix(self._parts[name]) for name in entry.logical.split("+")])

    def _matrix(self, part: Part) -> Tensor | BlockScaled:
        if part.scales is None:
            return self._rows(part)
        raw = bytearray(part.scales.nbytes)
        self._read_run(part.scales, part.scales.offset, memoryview(raw))
        scales = as_tensor(part.scales, raw, part.scales.shape).float()
        return BlockScaled(self._rows(part), scales, (part.slice.rows[0], part.slice.columns[0]))

    def _rows(self, part: Part) -> Tensor:
        raw = bytearray(part.slice_bytes)
        self._read(part, 0, part.slice.elements, memoryview(raw))
        self._progress(self.bytes_read)
        return as_tensor(part.stored, raw, part.slice.shape)

    def _fill_blocks(self, unit: Unit, digest: Digest) -> Iterator[bytes]:
        """Yields a digest as soon as its block is complete."""
        end, pieces = unit.offset + unit.nbytes, self._fill_pieces(unit)
        for start in range(unit.offset, end, BLOCK_BYTES):
            nbytes = min(BLOCK_BYTES, end - start)
            self._start, self._block = start, self._arena.build(start, nbytes)
            while next(pieces, end) < start + nbytes:
                pass
            yield digest(self._block)
            self._arena.put(start, nbytes)

    def _piece(self, start: int, end: int) -> memoryview:
        """Returns where bytes of the block in work are built."""
        return self._block[start - self._start : end - self._start]

    def _fill_pieces(self, unit: Unit) -> Iterator[int]:
        """Yields offsets up to which the unit is complete, every block's end among them."""
        cursor = unit.offset
        for entry in unit.tensors:
            if entry.alias:
                continue
            for source, first, last in self._sources(entry):
                # Gaps between tensors are complete as they are: zero.
                for _, end in _pieces(unit.offset, cursor, entry.offset + first):
                    cursor = end
                    yield end
                for start, end in _pieces(unit.offset, cursor, entry.offset + last):
                    source(start - entry.offset - first, start, end)
                    cursor = end
                    yield end

    def _sources(self, entry: TensorEntry) -> Iterator[tuple[_Source, int, int]]:
        if not entry.logical:
            yield self._from_memory(self._computed[entry.name]), 0, entry.nbytes
            return
        first = 0
        for name in entry.logical.split("+"):
            part = self._parts[name]
            size = part.slice.elements * entry.dtype.itemsize
            yield self._from_file(part, entry.dtype), first, first + size
            first += size

    def _from_memory(self, tensor: Tensor) -> _Source:
        raw = tensor.contiguous().view(torch.uint8).flatten()

        def fill(done: int, start: int, end: int) -> None:
            piece = raw[done : done + end - start]
            torch.frombuffer(self._piece(start, end), dtype=torch.uint8).copy_(piece)

        return fill

    def _from_file(self, part: Part, dtype: DType) -> _Source:
        found = stored_dtype(part.stored.dtype) or dtype

        def fill(done: int, start: int, end: int) -> None:
            landed = self._piece(start, end)
            first, count = done // dtype.itemsize, (end - start) // dtype.itemsize
            if found == dtype:
                self._read(part, first, count, landed)
            else:
                raw = bytearray(count * found.itemsize)
                self._read(part, first, count, memoryview(raw))
                piece = torch.frombuffer(raw, dtype=TORCH_DTYPES[found])
                torch.frombuffer(landed, dtype=TORCH_DTYPES[dtype]).copy_(piece)
            self._progress(self.bytes_read)

        return fill

    def _read(self, part: Part, first: int, count: int, into: memoryview) -> None:
        """Reads elements of a slice: whole rows at once, cut rows one by one."""
        itemsize = len(into) // count
        for start, length in part.slice.runs(first, count):
            run, into = into[: length * itemsize], into[length * itemsize :]
            self._read_run(part.stored, part.stored.offset + start * itemsize, run)

    def _read_run(self, stored: StoredTensor, offset: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._files[stored.path], [into], offset)
            if count == 0:
                raise CheckpointError(
                    f"{stored.path.name}: ends within {stored.name} although its header fits",
                    file=stored.path.name, tensor=stored.name,
                )  # fmt: skip
            into, offset = into[count:], offset + count
            self.bytes_read += count


_Source = Callable[[int, int, int], None]


def _pieces(base: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts a range at the ends of the blocks that count from `base`."""
    while start < end:
        border = base + ((start - base) // BLOCK_BYTES + 1) * BLOCK_BYTES
        yield start, min(border, end)
        start = min(border, end)
