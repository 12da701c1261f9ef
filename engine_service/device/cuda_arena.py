"""An arena on a CUDA device: one allocation of the driver, as torch views without a copy.

Its memory is none of torch's allocator, which would neither share it by descriptor nor
keep its address for good. Who frees what, and what happens when either end dies, stands in
`relay_service.memory.cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine_service.device.arena import Arena, Weights
from engine_service.device.shadow import DeviceShadow
from engine_service.errors import ArenaError
from relay_service.core.digests import block_digest
from relay_service.core.manifest import Block, Manifest
from relay_service.memory import cuda
from relay_service.memory.cuda_port import Driver


class CudaArena(Arena):
    """Weights on a device; blocks are built in pinned memory and copied while the next is."""

    _memory: cuda.CudaArena

    def __init__(
        self,
        manifest: Manifest,
        generation: str,
        *,
        driver: Driver,
        device: int,
        as_tensor: Callable[[cuda.CudaArena], Tensor] | None = None,
    ) -> None:
        """Allocates the memory and zeroes it.

        `as_tensor` returns the memory as uint8 `[data_bytes]`, by torch's CUDA unless given.
        Raises `relay_service.errors.ResourceExhausted` or `DeviceError`.
        """
        name = f"seedrelay-rank-{manifest.rank}"
        self._memory, self.descriptors = cuda.create(
            driver, device, name, generation, manifest.data_bytes
        )
        with torch.inference_mode(mode=False):
            data = (as_tensor or _on_device)(self._memory).zero_()
        super().__init__(manifest, data)
        # Before anybody is told of the memory: zeroing must not meet bytes that land.
        self.flush()

    @property
    def address(self) -> int:
        """Address of the first byte of the data, on the device."""
        return self._memory.address

    @property
    def page_kind(self) -> str:
        """Says where the memory lies."""
        return f"cuda:{self._memory.device}"

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a copy of at most a block of the data."""
        return self._memory.view(offset, nbytes)

    def build(self, offset: int, nbytes: int) -> memoryview:  # noqa: ARG002 - it may go anywhere
        """Returns zeroed, pinned bytes of the host."""
        return self._memory.build(nbytes)

    def put(self, offset: int, nbytes: int) -> None:
        """Starts to copy what was built."""
        self._memory.put(offset, nbytes)

    def flush(self) -> None:
        """Waits for every copy, and for every kernel of torch."""
        self._memory.flush()
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)

    def shadow(self) -> DeviceShadow:
        """Returns a copy on the device: there is no copy-on-write."""
        return DeviceShadow(self.manifest, self._bytes)

    def take(self, source: Weights, block: Block) -> bytes:
        """Copies a block on the device; what is digested is read back from where it came to."""
        at = block.offset, block.nbytes
        self.bytes_at(*at).copy_(source.bytes_at(*at))
        self.flush()
        return block_digest(self.view(*at))

    def replace_backing(self) -> Manifest:
        """Raises `ArenaError`: a device gives no way to take a mapping from another process."""
        raise ArenaError(
            "the relay did not return its mapping, and memory on a device cannot be taken away "
            "from it",
            hint="restart this instance",
        )


class _Interface:
    """Device memory as torch and others take it without a copy (CUDA Array Interface, 3)."""

    def __init__(self, memory: cuda.CudaArena) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.data_bytes,), "typestr": "|u1", "strides": None,
            "data": (memory.address, False), "version": 3,
        }  # fmt: skip


def _on_device(memory: cuda.CudaArena) -> Tensor:
    device = torch.device("cuda", memory.device)
    if memory.data_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    data = torch.as_tensor(_Interface(memory), device=device)
    if data.data_ptr() != memory.address:
        raise ArenaError("torch copied the arena instead of looking at it")
    return data
