"""Reads what a rank needs of a checkpoint's files, unit by unit as they lie there.

Within a unit (a layer, an expert) what the arena holds first is read first, wherever in the
files it lies: a block is complete, and digested, while it is in cache, and no matrix has to
wait for its halves or scales for long. A seek costs less than that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from engine_service.device.checkpoint import StoredTensor
from engine_service.device.collector import Collector
from engine_service.device.landing import Fill
from engine_service.device.parts import Part
from engine_service.errors import CheckpointError
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.rate import TokenBucket

Progress = Callable[[int, int], None]
_PIECE_BYTES = 8 * BLOCK_BYTES
"""Read for one piece; one at a time below a limit, so that the flow is even."""


def read_files(
    stored: Mapping[str, StoredTensor], collector: Collector, bytes_per_second: int,
    progress: Progress,
) -> dict[Path, os.stat_result]:  # fmt: skip
    """Brings a collector all that it needs, straight from the files to its place.

    Returns what each file was that was read, when all had been.

    Args:
        stored: Where each tensor lies, by name.
        collector: Of what this rank needs.
        bytes_per_second: Most bytes to read; 0 for no limit.
        progress: Called with bytes read so far and in all.

    Raises:
        CheckpointError: A file has become shorter than its header says.
        ResourceExhausted: What lies out of order in the files has no room on the disk.
    """
    bucket = TokenBucket(bytes_per_second)
    most = BLOCK_BYTES if bytes_per_second else _PIECE_BYTES
    needed = _in_order(collector.units, stored)
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(path.open("rb", buffering=0)).fileno()
            for path in {stored[name].path for name in needed}
        }
        for name in needed:
            part, lies = collector.parts[name], stored[name]
            step = max(1, most // part.dtype.itemsize)
            for first in range(0, part.slice.elements, step):
                count = min(step, part.slice.elements - first)
                if delay := bucket.delay(count * part.dtype.itemsize):
                    time.sleep(delay)
                collector.land(name, first, count, _reading(files[lies.path], lies, part, first))
                progress(collector.bytes_landed, collector.bytes_total)
        return {path: os.fstat(fd) for path, fd in files.items()}


def _in_order(units: list[list[str]], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Returns every tensor once; units in the order in which they begin in the files."""

    def begins(names: list[str]) -> tuple[Path, int]:
        return min((stored[name].path, stored[name].offset) for name in names)

    return list(dict.fromkeys(n for one in sorted(filter(None, units), key=begins) for n in one))


def _reading(fd: int, lies: StoredTensor, part: Part, first: int) -> Fill:
    """Returns what reads elements of a slice: whole rows at once, cut rows one by one."""
    itemsize = part.dtype.itemsize

    def read(into: memoryview, done: int) -> None:
        for start, length in part.slice.runs(first + done // itemsize, len(into) // itemsize):
            _read_run(fd, lies, lies.offset + start * itemsize, into[: length * itemsize])
            into = into[length * itemsize :]

    return read


def _read_run(fd: int, lies: StoredTensor, offset: int, into: memoryview) -> None:
    while into:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            raise CheckpointError(
                f"{lies.origin}: ends within {lies.name} although its header fits",
                file=lies.origin, tensor=lies.name,
            )  # fmt: skip
        into, offset = into[count:], offset + count


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors of as many bytes hold the same."""
    with one.path.open("rb") as left, other.path.open("rb") as right:
        for done in range(0, one.nbytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, one.nbytes - done)
            mine = os.pread(left.fileno(), size, one.offset + done)
            if mine != os.pread(right.fileno(), size, other.offset + done):
                return False
    return True
