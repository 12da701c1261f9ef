"""Digests what lies in a rank's arena now, a piece at a time between two steps.

Of every block, as the manifest does, and of every tensor, as people name them; while a block
is in cache for the one, it is digested for the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from torch import Tensor

from engine_service.core.check_messages import Digested, DigestWeights, FoundWeights
from engine_service.device.arena import Arena
from engine_service.device.torch_dtypes import bytes_of
from engine_service.errors import WrongState
from relay_service.core.digests import block_digest, block_hasher
from relay_service.core.manifest import BLOCK_BYTES, TensorEntry, Unit

PIECE_SECONDS = 0.02
"""After which the rank is given back to steps; a block more than that, at most."""


class WeightChecker:
    """The check of one rank's weights, however many pieces it takes."""

    def __init__(
        self, arena: Arena, read: Callable[[], Iterable[Tensor]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`read` returns the weights that a forward pass reads, as it holds them now."""
        self._arena = arena
        self._read = read
        self._clock = clock
        self._sequence = -1
        self._blocks: list[bytes] = []
        self._tensors: dict[str, bytes] = {}
        self._walk: Iterator[None] | None = None

    def answer(self, command: DigestWeights) -> Digested:
        """Digests a piece. Raises `WrongState` where nobody began."""
        began = self._clock()
        if command.begin:
            self._sequence, self._blocks, self._tensors = self._arena.sequence, [], {}
            self._walk = chain.from_iterable(map(self._digest, self._arena.manifest.units))
        if self._sequence < 0:
            raise WrongState("no check has begun")
        # An odd number means that nobody knows what lies there.
        changed, found = self._sequence != self._arena.sequence or self._sequence % 2 == 1, None
        if not changed and self._walk and self._finished(self._walk, began + PIECE_SECONDS):
            self._walk, found = None, self._found()
        return Digested(seconds=self._clock() - began, changed=changed, found=found)

    def _finished(self, walk: Iterator[None], until: float) -> bool:
        """Goes on for a while; returns whether there is nothing left to digest."""
        self._arena.flush()
        return all(self._clock() < until for _ in walk)

    def _digest(self, unit: Unit) -> Iterator[None]:
        """Digests a unit and its tensors, and stops after each block."""
        hashers = {one.name: (one, block_hasher()) for one in unit.tensors if _lies_here(one)}
        for start in range(unit.offset, unit.offset + unit.nbytes, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, unit.offset + unit.nbytes)
            data = self._arena.view(start, end - start)
            self._blocks.append(block_digest(data))
            for entry, hasher in hashers.values():
                first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, end)
                if first < last:
                    hasher.update(data[first - start : last - start])
            yield
        for entry in unit.tensors:
            if entry.name in hashers:
                self._tensors[entry.name] = hashers[entry.name][1].digest()
                continue
            hasher = block_hasher()
            for piece in self._pieces(entry):
                hasher.update(piece)
                yield
            self._tensors[entry.name] = hasher.digest()

    def _pieces(self, entry: TensorEntry) -> Iterator[memoryview]:
        """Yields the elements of a tensor in row-major order, some rows at a time."""
        size = entry.dtype.itemsize
        with_bytes = [*(stride * size for stride in entry.strides), 1]
        unit = Unit(entry.name, entry.offset, entry.nbytes, ())
        data = self._arena.bytes_of(unit)
        rows = data.as_strided((*entry.shape, size), with_bytes, data.storage_offset())
        count = max(1, BLOCK_BYTES // (math.prod(entry.shape[1:]) * size or 1))
        for first in range(0, rows.shape[0], count):
            yield bytes_of(rows[first : first + count].cpu().contiguous())

    def _found(self) -> FoundWeights:
        """Returns all that was digested, and what is read from elsewhere."""
        arena = self._arena
        return FoundWeights(
            manifest=arena.manifest.with_digests(self._blocks),
            tensors=tuple(self._tensors.values()),  # in the order of the walk
            address=arena.address,
            misplaced=tuple(self._misplaced()),
        )

    def _misplaced(self) -> Iterator[str]:
        read = {tensor.data_ptr() for tensor in self._read()}
        for unit in self._arena.manifest.units:
            for entry in unit.tensors:
                if entry.nbytes and self._arena.address + entry.offset not in read:
                    yield entry.name


def _lies_here(entry: TensorEntry) -> bool:
    """Returns whether a tensor has bytes of its own that leave nothing out."""
    whole = math.prod(entry.shape) * entry.dtype.itemsize
    return not entry.alias and entry.nbytes == whole
