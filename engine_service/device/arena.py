"""Holds every weight of a rank in one shared allocation, as torch views.

The memory is a memfd that the relay maps too. Its address never changes: neither
sealing nor replacing what backs it moves a tensor.
"""

from __future__ import annotations

import ctypes
import os

import torch

from engine_service.device.plan import Memory
from engine_service.device.torch_dtypes import TORCH_DTYPES
from engine_service.errors import ArenaError
from relay_service.core.manifest import Manifest, TensorEntry, block_digest
from relay_service.memory.host import HostArena, create_memfd, is_sealed, seal


class Arena:
    """One rank's weights. Lives as long as the process: views of it are everywhere."""

    def __init__(self, manifest: Manifest, memory: Memory) -> None:
        """Takes over memory that was allocated for `manifest`."""
        self.manifest = manifest
        self.fd, self._memory = memory.fd, memory.mapping
        with torch.inference_mode(mode=False):  # else nobody may write them in place later
            self._bytes = _bytes_of(self._memory)
            self.tensors: dict[str, torch.Tensor] = {
                entry.name: self._tensor(entry) for unit in manifest.units for entry in unit.tensors
            }

    @property
    def address(self) -> int:
        """Address of the first byte of the data."""
        return self._memory.address

    @property
    def page_kind(self) -> str:
        """Says which pages back the memory."""
        return self._memory.page_kind()

    @property
    def sealed(self) -> bool:
        """Whether nobody can map the memory for writing any more."""
        return is_sealed(self.fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns writable bytes of the data."""
        return self._memory.view(offset, nbytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's storage is the arena."""
        return tensor.untyped_storage().data_ptr() == self._bytes.untyped_storage().data_ptr()

    def seal(self) -> None:
        """Forbids new writable mappings. Raises `ArenaError` when the kernel did not do it.

        Mappings that exist stay writable: whoever had one must have returned it, or
        `replace_backing` cuts it off.
        """
        try:
            seal(self.fd)
        except OSError as error:
            raise ArenaError(f"cannot seal the arena: {error.strerror}") from error
        if not self.sealed:
            raise ArenaError("the arena is not sealed although sealing it succeeded")

    def replace_backing(self) -> Manifest:
        """Moves the contents into fresh memory at the same address, and digests them.

        Cuts off every mapping that somebody else still holds of the old memory. The
        digests are of the new memory, so a write that raced with the copy shows.
        """
        fresh = create_memfd(f"seedrelay-rank-{self.manifest.rank}", self.manifest.data_bytes)
        _write_all(fresh, self._memory)
        size = self.manifest.data_bytes
        self._memory = HostArena(fresh, size, writable=True, address=self._memory.base)
        os.close(self.fd)
        self.fd = fresh
        return self.digested()

    def digested(self) -> Manifest:
        """Returns the manifest with digests of the current contents: a pass over all bytes."""
        blocks = map(self.manifest.block, range(self.manifest.block_count))
        digests = [block_digest(self.view(block.offset, block.nbytes)) for block in blocks]
        return self.manifest.with_digests(digests)

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        flat = self._bytes[entry.offset : entry.offset + entry.nbytes]
        typed = flat.view(TORCH_DTYPES[entry.dtype])
        return typed.as_strided(entry.shape, entry.strides)


def _bytes_of(memory: HostArena) -> torch.Tensor:
    if memory.data_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory.view(0, memory.data_bytes), dtype=torch.uint8)


def _write_all(fd: int, memory: HostArena) -> None:
    """Copies header and data through a second mapping of `fd`."""
    copy = HostArena(fd, memory.data_bytes, writable=True)
    ctypes.memmove(copy.base, memory.base, memory.size)
    copy.close()
