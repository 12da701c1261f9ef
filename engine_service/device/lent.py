"""Memory that is lent to a relay, which lands blocks of new weights in it.

It has an arena's size and header, and costs nothing where nothing has landed. What the relay
has given back is read from there into a shadow, verified, and freed behind the reader.
"""

from __future__ import annotations

import ctypes
import os

from engine_service.device.arena import Weights
from engine_service.errors import ArenaError, ResourceExhausted
from relay_service.core.digests import block_digest
from relay_service.core.manifest import HEADER_BYTES, UNIT_ALIGN, Block, Manifest
from relay_service.memory.header import Header
from relay_service.memory.sparse import create_sparse_memfd

_PUNCH_HOLE, _KEEP_SIZE = 0x2, 0x1  # linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Lent:
    """A sparse memory file; whoever has a descriptor may write until it is read."""

    def __init__(self, manifest: Manifest, generation: str) -> None:
        """Creates it. Raises `relay_service.errors.ResourceExhausted`."""
        self.fd = create_sparse_memfd(f"seedrelay-staging-{manifest.rank}", manifest.data_bytes)
        page = ctypes.create_string_buffer(HEADER_BYTES)
        Header(ctypes.addressof(page)).write(generation, manifest.data_bytes)
        os.pwrite(self.fd, page.raw, 0)

    def move(self, block: Block, weights: Weights, landed: Manifest) -> None:
        """Moves a block to where it belongs, and frees it here.

        Raises `ArenaError` where the bytes that have come there are not those that should
        have `landed`.
        """
        into = weights.build(block.offset, block.nbytes)
        self._read(block, into)
        digest = block_digest(into)
        weights.put(block.offset, block.nbytes)
        if digest != landed.block_digest(block.index):
            tensor = landed.tensor_at(block.index)
            raise ArenaError(
                f"block {block.index} ({tensor}) has landed with other bytes than it should have",
                tensor=tensor,
            )

    def close(self) -> None:
        """Lets go of it; twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read(self, block: Block, into: memoryview) -> None:
        start, done = HEADER_BYTES + block.offset, 0
        while done < len(into):
            done += os.preadv(self.fd, [into[done:]], start + done)
        pages = -(-block.nbytes // UNIT_ALIGN) * UNIT_ALIGN  # units begin on pages of their own
        if _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, start, pages):
            error = ctypes.get_errno()
            raise ResourceExhausted(f"cannot free staged memory: {os.strerror(error)}")
