"""`libcuda.so.1` as Python callbacks behind C signatures, over the fake driver.

What calls it passes real structures, pointers and numbers through ctypes, and gets error
numbers back, as from the library itself.
"""

# Each function is named, and described, by the driver API.
# ruff: noqa: D102, N802

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from fake_cuda import FakeDriver

from relay_service.errors import DeviceError, ResourceExhausted
from relay_service.memory import cuda_abi as abi
from relay_service.memory.host import _libc

ERRORS = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 214: b"ECC"}
_PROT_NONE, _MAP_FIXED = 0, 0x10


class FakeLibrary:
    """The functions of `cuda_abi.SIGNATURES`, for `CudaDriver` to load."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.initialised = False
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, int]] = {}
        for name, arguments in abi.SIGNATURES.items():
            function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(_guarded(getattr(self, name)))
            setattr(self, name, function)

    def cuInit(self, flags: int) -> None:
        assert flags == 0
        self.initialised = True

    def cuGetErrorName(self, status: int, name: Any) -> None:
        name[0] = ERRORS[status]

    def cuDeviceGetCount(self, count: Any) -> None:
        assert self.initialised
        count[0] = len(self.driver.devices())

    def cuDeviceGet(self, device: Any, number: int) -> None:
        device[0] = number

    def cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> None:
        ctypes.memmove(uuid, self.driver.devices()[device], 16)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.driver.use(device)
        context[0] = 0xC0000 + device

    def cuCtxSetCurrent(self, context: int) -> None:
        self.driver.use(context - 0xC0000)

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, flags: int) -> None:
        size[0] = self.driver.granularity(_device(properties))

    def cuMemCreate(self, handle: Any, nbytes: int, properties: Any, flags: int) -> None:
        assert flags == 0
        handle[0] = self.driver.allocate(_device(properties), nbytes)

    def cuMemExportToShareableHandle(self, fd: int, handle: int, kind: int, flags: int) -> None:
        assert (kind, flags) == (abi.POSIX_DESCRIPTOR, 0)
        ctypes.c_int.from_address(fd).value = self.driver.export(handle)

    def cuMemImportFromShareableHandle(self, handle: Any, fd: int, kind: int) -> None:
        assert kind == abi.POSIX_DESCRIPTOR
        handle[0] = self.driver.adopt(fd)

    def cuMemGetAllocationPropertiesFromHandle(self, properties: Any, handle: int) -> None:
        location = abi.Location(abi.LOCATION_DEVICE, self.driver.device_of(handle))
        properties[0] = abi.AllocationProperties(1, 1, location)

    def cuMemRelease(self, handle: int) -> None:
        self.driver.release(handle)

    def cuMemAddressReserve(
        self, address: Any, nbytes: int, alignment: int, wished: int, flags: int
    ) -> None:
        assert (alignment, wished, flags) == (0, 0, 0)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address[0] = _libc.mmap(None, nbytes, _PROT_NONE, private, -1, 0)
        self._reserved[address[0]] = nbytes

    def cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert address not in self._mapped, "still mapped"
        assert self._reserved.pop(address) == nbytes
        _libc.munmap(address, nbytes)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert (offset, flags) == (0, 0)
        assert self._reserved[address] == nbytes
        spare = self.driver.map(handle, 0, nbytes, writable=True)  # refuses a wrong size
        self.driver.unmap(spare, nbytes)
        self._mapped[address] = handle, nbytes

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> None:
        handle, size = self._mapped[address]
        location = access[0].location
        assert (size, count) == (nbytes, 1)
        assert location.type == abi.LOCATION_DEVICE
        assert location.id == self.driver.device_of(handle)
        writable = {abi.READ: False, abi.READ_WRITE: True}[access[0].flags]
        fd, flags = self.driver._handles[handle], mmap.MAP_SHARED | _MAP_FIXED
        _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        self.driver._maps[address] = nbytes, writable
        self.driver.live["map"] += 1

    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert self._mapped.pop(address)[1] == nbytes
        self.driver._maps.pop(address)
        self.driver.live["map"] -= 1

    def cuMemHostAlloc(self, address: Any, nbytes: int, flags: int) -> None:
        assert flags == abi.HOST_ALLOC_PORTABLE
        address[0] = self.driver.allocate_pinned(nbytes)

    def cuMemFreeHost(self, address: int) -> None:
        self.driver.free_pinned(address)

    def cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == abi.STREAM_NON_BLOCKING
        stream[0] = self.driver.create_stream()

    def cuStreamDestroy_v2(self, stream: int) -> None:
        self.driver.destroy_stream(stream)

    def cuStreamSynchronize(self, stream: int) -> None:
        self.driver.synchronize(stream)

    def cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags == abi.EVENT_DISABLE_TIMING
        event[0] = self.driver.create_event()

    def cuEventDestroy_v2(self, event: int) -> None:
        self.driver.destroy_event(event)

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.driver.record(event, stream)

    def cuEventSynchronize(self, event: int) -> None:
        self.driver.wait(event)

    def cuMemcpyHtoDAsync_v2(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self.driver.copy_in(device, host, nbytes, stream)

    def cuMemcpyDtoHAsync_v2(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self.driver.copy_out(host, device, nbytes, stream)


def _guarded(function: Any) -> Any:
    def call(*arguments: Any) -> int:
        try:
            function(*arguments)
        except ResourceExhausted:
            return 2
        except DeviceError as error:
            return 214 if "ECC" in str(error) else 1
        except BaseException:  # noqa: BLE001 - a callback cannot raise; the caller sees the number
            import traceback

            traceback.print_exc()
            return 1
        return 0

    return call


def _device(properties: Any) -> int:
    found = properties[0]
    assert found.type == abi.ALLOCATION_PINNED
    assert found.requested_handle_types == abi.POSIX_DESCRIPTOR
    assert found.location.type == abi.LOCATION_DEVICE
    assert found.win32_handle_meta_data is None
    assert bytes(found.alloc_flags) == bytes(8)
    return found.location.id
