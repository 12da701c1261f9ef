"""What arenas on a device need of a CUDA driver. Plain Python.

Addresses, handles, streams and events are the driver's own, as numbers. Every call raises
`DeviceError` with the name of the call and of the error, `ResourceExhausted` where memory
is missing. Devices are counted from 0 as this process sees them.
"""

from __future__ import annotations

from typing import Protocol


class Driver(Protocol):
    """The part of the CUDA driver that shares and copies device memory."""

    def devices(self) -> list[bytes]:
        """Returns the UUID, 16 bytes, of every device that this process sees."""

    def use(self, device: int) -> None:
        """Makes the device's primary context, the one that torch uses, this thread's."""

    def granularity(self, device: int) -> int:
        """Returns the bytes that the size of an allocation is a multiple of."""

    def allocate(self, device: int, nbytes: int) -> int:
        """Allocates memory that can be shared, and returns its handle. Its contents are unknown."""

    def export(self, handle: int) -> int:
        """Returns a descriptor of an allocation; the caller closes it."""

    def adopt(self, fd: int) -> int:
        """Returns a handle of the allocation behind a descriptor, which stays the caller's."""

    def device_of(self, handle: int) -> int:
        """Returns the device on which an allocation lies."""

    def release(self, handle: int) -> None:
        """Gives a handle back. The memory lives on while it is mapped or has other handles."""

    def map(self, handle: int, device: int, nbytes: int, *, writable: bool) -> int:
        """Maps an allocation and returns its address.

        Raises `DeviceError` for more bytes than the allocation has.
        """

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps what `map` returned."""

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocates page-locked host memory, which copies reach without another buffer."""

    def free_pinned(self, address: int) -> None:
        """Frees page-locked memory."""

    def create_stream(self) -> int:
        """Creates a stream that waits for no other one."""

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream."""

    def synchronize(self, stream: int) -> None:
        """Waits until all work of a stream is done. Raises what went wrong in it."""

    def create_event(self) -> int:
        """Creates an event; before it is recorded nobody waits for it."""

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""

    def record(self, event: int, stream: int) -> None:
        """Marks the end of the work that a stream has by now."""

    def wait(self, event: int) -> None:
        """Waits, on the host, until the work before an event is done."""

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        """Copies from pinned memory to an address on the device, some time later."""

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        """Copies from an address on the device to pinned memory, some time later."""
