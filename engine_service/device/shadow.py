"""Memory beside an arena in which new weights are put together while the arena serves.

On the host it is a private, copy-on-write mapping of the arena's own memory: reads see what
serves, and only pages that were written cost memory. A device has no such thing: there it is
a copy.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from engine_service.device.arena import Shadow
from engine_service.device.torch_dtypes import bytes_of
from engine_service.errors import ResourceExhausted
from relay_service.core.buffers import address_of
from relay_service.core.manifest import HEADER_BYTES, UNIT_ALIGN, Block, Manifest
from relay_service.memory.host import counted_bytes

_MAP_NORESERVE = 0x4000  # the mmap module of Python 3.11 does not name it

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostShadow(Shadow):
    """A private mapping. It is unmapped when nothing looks at it any more, never before."""

    grows = True

    def __init__(self, manifest: Manifest, fd: int) -> None:
        """Maps the memory of an arena. Raises `ResourceExhausted`."""
        try:
            self._mapped = mmap.mmap(
                fd, HEADER_BYTES + manifest.data_bytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )  # fmt: skip
        except OSError as error:
            raise ResourceExhausted(f"cannot map a shadow of the arena: {error}") from error
        # Each view counts as a use of the mapping, so that it cannot be unmapped below one.
        self._data = memoryview(self._mapped)[HEADER_BYTES:]
        with torch.inference_mode(mode=False):
            data = torch.empty(0, dtype=torch.uint8)
            if manifest.data_bytes:
                data = torch.frombuffer(self._data, dtype=torch.uint8)
        super().__init__(manifest, data)

    @property
    def extra_bytes(self) -> int:
        """Bytes of the pages that were written (proc(5), smaps: Anonymous and Swap)."""
        return counted_bytes(address_of(self._data) - HEADER_BYTES, "Anonymous", "Swap")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns writable bytes of the data."""
        return self._data[offset : offset + nbytes]

    def build(self, offset: int, nbytes: int) -> memoryview:
        """Returns the bytes themselves."""
        return self.view(offset, nbytes)

    def put(self, offset: int, nbytes: int) -> None:
        """Does nothing: what was built is there."""

    def flush(self) -> None:
        """Does nothing: what was written is there."""

    def revert(self, block: Block) -> None:
        """Drops the block's pages; its bytes are the arena's again."""
        # Blocks begin on a page, and no unit begins on the page on which another one ends.
        nbytes = -(-block.nbytes // UNIT_ALIGN) * UNIT_ALIGN
        end = min(HEADER_BYTES + block.offset + nbytes, len(self._mapped))
        begin = HEADER_BYTES + block.offset
        self._mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Drops every page that was written, without keeping other threads from running."""
        first = address_of(self._data) - HEADER_BYTES
        _libc.madvise(first, len(self._mapped), mmap.MADV_DONTNEED)


class DeviceShadow(Shadow):
    """A copy on a device."""

    grows = False

    def __init__(self, manifest: Manifest, data: Tensor) -> None:
        """Copies `data`, the arena's bytes. Raises `ResourceExhausted`."""
        try:
            with torch.inference_mode(mode=False):
                super().__init__(manifest, data.clone())
        except torch.OutOfMemoryError as error:
            raise ResourceExhausted(
                f"the device has no room for another {data.nbytes} bytes of weights",
                hint="stage layerwise, or free memory on the device",
            ) from error
        self._built = torch.empty(0, dtype=torch.uint8)

    @property
    def extra_bytes(self) -> int:
        """Bytes of the copy."""
        return self._bytes.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a copy of bytes of the data."""
        return bytes_of(self.bytes_at(offset, nbytes).cpu())

    def build(self, offset: int, nbytes: int) -> memoryview:  # noqa: ARG002 - it may go anywhere
        """Returns zeroed bytes of the host."""
        self._built = torch.zeros(nbytes, dtype=torch.uint8)
        return bytes_of(self._built)

    def put(self, offset: int, nbytes: int) -> None:
        """Copies what was built."""
        self.bytes_at(offset, nbytes).copy_(self._built)

    def flush(self) -> None:
        """Waits for every kernel of torch."""
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)

    def revert(self, block: Block) -> None:
        """Does nothing: a copy costs what it costs."""

    def close(self) -> None:
        """Does nothing: the memory goes back to torch when nothing looks at it any more."""
