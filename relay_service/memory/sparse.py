"""Host memory that is allocated as it is written: what engines lend for staging.

Plain Python and libc, like `host`. A page that cannot be allocated when it is touched would be
a SIGBUS, or wake the out-of-memory killer; so each range is allocated before it is written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from relay_service.core.copies import Copy
from relay_service.core.manifest import HEADER_BYTES
from relay_service.errors import ResourceExhausted
from relay_service.memory.host import (
    F_ADD_SEALS,
    F_SEAL_GROW,
    F_SEAL_SHRINK,
    HostArena,
    available_bytes,
)

LOOK_BYTES = 64 << 20
"""What may be allocated before the host is asked again what it has."""


def create_sparse_memfd(name: str, data_bytes: int) -> int:
    """Creates memory for an arena, of which nothing is allocated, and returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, HEADER_BYTES + data_bytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise ResourceExhausted(f"cannot make memory of {data_bytes} bytes: {error}") from error
    return fd


class SparseArena(HostArena):
    """A writable mapping of an arena of which little may be allocated."""

    def __init__(self, fd: int, data_bytes: int) -> None:
        """Maps `fd`, which must stay open until `close`. Raises what `HostArena` does."""
        super().__init__(fd, data_bytes, writable=True, populate=False)
        self._fd = fd
        self._allowed = 0

    def place(self, offset: int, nbytes: int) -> None:
        """Returns none: receiving could allocate memory that there isn't, and get us killed."""

    def land(self, offset: int, data: memoryview | bytes) -> bytes:
        """Allocates, copies and digests a block. Raises `ResourceExhausted`."""
        self._allocate(offset, len(data))
        return super().land(offset, data)

    def scatter(self, block: memoryview | bytes, pieces: Sequence[Copy]) -> bool:
        """Allocates what runs of a block span, and copies them. Raises `ResourceExhausted`."""
        for piece in pieces:
            self._allocate(piece.target_offset, piece.target_span)
        return super().scatter(block, pieces)

    def _allocate(self, offset: int, nbytes: int) -> None:
        self.view(offset, nbytes)  # is it within the arena, and mapped?
        if self._allowed < nbytes:  # threads may count past each other: it is an estimate anyway
            self._allowed = min(LOOK_BYTES, available_bytes())
        if self._allowed < nbytes:
            raise _no_memory(nbytes, f"{self._allowed} bytes are available")
        try:
            if nbytes:
                os.posix_fallocate(self._fd, HEADER_BYTES + offset, nbytes)
        except OSError as error:
            raise _no_memory(nbytes, str(error.strerror)) from error
        self._allowed -= nbytes


def _no_memory(nbytes: int, reason: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"cannot allocate {nbytes} bytes to stage new weights: {reason}",
        field="staging_bytes", found=str(nbytes), hint="free memory or raise the limit",
    )  # fmt: skip
