"""The CUDA driver API, as far as arenas need it, through ctypes on `libcuda.so.1`.

Source: docs.nvidia.com/cuda/cuda-driver-api, chapters Virtual Memory Management, Memory,
Stream and Event Management; values and layouts are those of `cuda.h`. The driver comes with
the host's kernel module, so nothing is installed, and it is loaded only by `load`.

Every thread that calls must have a context: `use` makes the device's primary context its
own. It is the context that torch uses in an engine. A relay keeps it until it ends: some
hundred MiB of the device's memory, once per device on which it has mapped an arena.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from relay_service.errors import DeviceError, ResourceExhausted
from relay_service.memory import cuda_abi as abi


@functools.cache
def load() -> CudaDriver:
    """Loads and starts the driver. Raises `DeviceError` where there is none, or no device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"there is no CUDA driver on this host: {error}",
            field="device", found="cuda", hint="install the NVIDIA driver, or use --device cpu",
        ) from error  # fmt: skip
    return CudaDriver(library)


class CudaDriver:
    """`Driver` on a loaded library. Its methods may be called from any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Starts the driver. Raises `DeviceError`."""
        self._library = library
        for name, arguments in abi.SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise DeviceError(
                    f"the CUDA driver of this host has no {name}", hint="update the driver"
                )
            function.argtypes, function.restype = arguments, c_int
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    def devices(self) -> list[bytes]:  # noqa: D102 - what a method does stands in its port
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return [self._uuid(number) for number in range(count.value)]

    def use(self, device: int) -> None:  # noqa: D102
        with self._lock:
            if device not in self._contexts:
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(device))
                self._contexts[device] = context.value or 0
        self._call("cuCtxSetCurrent", self._contexts[device])

    def granularity(self, device: int) -> int:  # noqa: D102
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._shared(device)), 0)
        return size.value

    def allocate(self, device: int, nbytes: int) -> int:  # noqa: D102
        handle = abi.Handle()
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._shared(device)), 0)
        return handle.value

    def export(self, handle: int) -> int:  # noqa: D102
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, abi.POSIX_DESCRIPTOR, 0)
        return fd.value

    def adopt(self, fd: int) -> int:  # noqa: D102
        handle = abi.Handle()
        # The descriptor itself stands in the place of a pointer.
        self._call("cuMemImportFromShareableHandle", byref(handle), fd, abi.POSIX_DESCRIPTOR)
        return handle.value

    def device_of(self, handle: int) -> int:  # noqa: D102
        properties = abi.AllocationProperties()
        self._call("cuMemGetAllocationPropertiesFromHandle", byref(properties), handle)
        if properties.location.type != abi.LOCATION_DEVICE:
            raise DeviceError("the allocation lies on no device")
        return int(properties.location.id)

    def release(self, handle: int) -> None:  # noqa: D102
        self._call("cuMemRelease", handle)

    def map(self, handle: int, device: int, nbytes: int, *, writable: bool) -> int:  # noqa: D102
        address = abi.Address()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
        except BaseException:
            self._call("cuMemAddressFree", address, nbytes)
            raise
        try:
            access = abi.AccessDescription(
                self._location(device), abi.READ_WRITE if writable else abi.READ
            )
            self._call("cuMemSetAccess", address, nbytes, byref(access), 1)
        except BaseException:
            self.unmap(address.value, nbytes)
            raise
        return address.value

    def unmap(self, address: int, nbytes: int) -> None:  # noqa: D102
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemAddressFree", address, nbytes)

    def allocate_pinned(self, nbytes: int) -> int:  # noqa: D102
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), nbytes, abi.HOST_ALLOC_PORTABLE)
        return address.value or 0

    def free_pinned(self, address: int) -> None:  # noqa: D102
        self._call("cuMemFreeHost", address)

    def create_stream(self) -> int:  # noqa: D102
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), abi.STREAM_NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:  # noqa: D102
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:  # noqa: D102
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:  # noqa: D102
        event = c_void_p()
        self._call("cuEventCreate", byref(event), abi.EVENT_DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:  # noqa: D102
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:  # noqa: D102
        self._call("cuEventRecord", event, stream)

    def wait(self, event: int) -> None:  # noqa: D102
        self._call("cuEventSynchronize", event)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:  # noqa: D102
        self._call("cuMemcpyHtoDAsync_v2", device, host, nbytes, stream)

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:  # noqa: D102
        self._call("cuMemcpyDtoHAsync_v2", host, device, nbytes, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise self._error(name, status)

    def _error(self, name: str, status: int) -> DeviceError | ResourceExhausted:
        text = c_char_p()
        self._library.cuGetErrorName(status, byref(text))
        error = text.value.decode("ascii", "replace") if text.value else f"error {status}"
        kind = ResourceExhausted if status == abi.OUT_OF_MEMORY else DeviceError
        return kind(f"{name} failed: {error}", call=name, found=error)

    def _device(self, number: int) -> c_int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), number)
        return device

    def _uuid(self, number: int) -> bytes:
        uuid = abi.Uuid()
        self._call("cuDeviceGetUuid_v2", byref(uuid), self._device(number))
        return bytes(uuid)

    def _location(self, device: int) -> abi.Location:
        return abi.Location(abi.LOCATION_DEVICE, device)

    def _shared(self, device: int) -> abi.AllocationProperties:
        """Describes memory on a device that can be handed out as a descriptor."""
        return abi.AllocationProperties(
            abi.ALLOCATION_PINNED, abi.POSIX_DESCRIPTOR, self._location(device)
        )
