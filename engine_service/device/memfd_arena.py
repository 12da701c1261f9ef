"""An arena in host memory: a memfd that the relay maps too."""

from __future__ import annotations

import ctypes
import os
import weakref

import torch

from engine_service.device.arena import Arena, Weights
from engine_service.device.plan import Memory, allocate, create_backing
from engine_service.device.shadow import HostShadow
from relay_service.core.manifest import Block, Manifest
from relay_service.memory.host import HostArena


class MemfdArena(Arena):
    """Weights in a memfd; blocks are built where they stay."""

    _memory: HostArena

    def __init__(self, manifest: Manifest, generation: str, memory: Memory | None = None) -> None:
        """Takes over memory that was allocated for the manifest, or allocates it, all zero.

        Raises `relay_service.errors.ResourceExhausted`.
        """
        memory = memory or allocate(manifest, generation)
        self._own(memory.fd)
        self._memory = memory.mapping
        with torch.inference_mode(mode=False):
            data = _bytes_of(self._memory)
        super().__init__(manifest, data)

    @property
    def address(self) -> int:
        """Address of the first byte of the data."""
        return self._memory.address

    @property
    def page_kind(self) -> str:
        """Says which pages back the memory."""
        return self._memory.page_kind()

    def gather_pages(self) -> None:
        """Has the kernel move the memory into huge pages, as far as it has some."""
        self._memory.gather_pages()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns writable bytes of the data."""
        return self._memory.view(offset, nbytes)

    def build(self, offset: int, nbytes: int) -> memoryview:
        """Returns the block itself."""
        return self._memory.view(offset, nbytes)

    def put(self, offset: int, nbytes: int) -> None:
        """Does nothing: what was built is there."""

    def flush(self) -> None:
        """Does nothing: what was written is there."""

    def replace_backing(self) -> Manifest:
        """Moves the contents into fresh memory at the same address, and digests them.

        Cuts off every mapping that somebody else still holds of the old memory. The
        digests are of the new memory, so a write that raced with the copy shows.
        """
        fresh = create_backing(self.manifest)
        _write_all(fresh, self._memory)
        size = self.manifest.data_bytes
        self._memory = HostArena(fresh, size, writable=True, address=self._memory.base)
        self.close()
        self._own(fresh)
        return self.digested()

    def shadow(self) -> HostShadow:
        """Returns a mapping whose pages are this arena's until they are written."""
        return HostShadow(self.manifest, self.descriptors[0])

    def take(self, source: Weights, block: Block) -> bytes:
        """Copies a block and digests what landed while it is in cache."""
        return self._memory.land(block.offset, source.view(block.offset, block.nbytes))

    def close(self) -> None:
        """Closes the descriptor, as the end of the arena does. What is mapped stays."""
        self._closing()

    def _own(self, fd: int) -> None:
        self.descriptors = (fd,)
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False


def _bytes_of(memory: HostArena) -> torch.Tensor:
    if memory.data_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory.view(0, memory.data_bytes), dtype=torch.uint8)


def _write_all(fd: int, memory: HostArena) -> None:
    """Copies header and data through a second mapping of `fd`."""
    copy = HostArena(fd, memory.data_bytes, writable=True)
    ctypes.memmove(copy.base, memory.base, memory.size)
    copy.close()
