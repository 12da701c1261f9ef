"""A file without a name for what has no room in memory. It is gone with its last descriptor.

It lies where temporary files do (`TMPDIR`). Room is reserved before a byte is taken, so
that a full disk is met while everything that came before is still whole.
"""

from __future__ import annotations

import os
import tempfile

from engine_service.errors import ResourceExhausted


class Spill:
    """Regions of one file; those that were freed are taken again by others of their size."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="seedrelay-spill-", buffering=0)  # noqa: SIM115 - closed by `close`
        self._size = 0
        self._free: dict[int, list[int]] = {}

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._size

    def reserve(self, nbytes: int) -> int:
        """Returns the offset of a region. Raises `ResourceExhausted` on a full disk."""
        if regions := self._free.get(nbytes):
            return regions.pop()
        try:
            os.posix_fallocate(self._file.fileno(), self._size, nbytes)
        except OSError as error:
            raise ResourceExhausted(
                f"no room for {nbytes} bytes that came before their turn in "
                f"{tempfile.gettempdir()}: {error.strerror}",
                hint="free space there, name another folder with TMPDIR, or send tensors in order",
            ) from error
        self._size += nbytes
        return self._size - nbytes

    def release(self, offset: int, nbytes: int) -> None:
        """Gives a region back."""
        self._free.setdefault(nbytes, []).append(offset)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes within a region."""
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def read(self, offset: int, into: memoryview) -> None:
        """Reads what was written."""
        while into:
            count = os.preadv(self._file.fileno(), [into], offset)
            if not count:
                raise ResourceExhausted("the file of what came before its turn has lost its end")
            into, offset = into[count:], offset + count

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()
