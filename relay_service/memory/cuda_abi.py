"""Values, structures and signatures of `cuda.h`, as far as arenas need them.

A wrong layout would be read as another request, so a test holds sizes and offsets to those
that a C compiler gives.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

OUT_OF_MEMORY = 2
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
POSIX_DESCRIPTOR = 1
READ, READ_WRITE = 1, 3
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
HOST_ALLOC_PORTABLE = 1  # pinned for every context, whichever thread frees it

Address = c_ulonglong  # CUdeviceptr
Handle = c_ulonglong  # CUmemGenericAllocationHandle


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """`CUmemAllocationProp.allocFlags`."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte), ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`, 32 bytes."""

    _fields_ = (
        ("type", c_int), ("requested_handle_types", c_int), ("location", Location),
        ("win32_handle_meta_data", c_void_p), ("alloc_flags", AllocationFlags),
    )  # fmt: skip


class AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`, 12 bytes."""

    _fields_ = (("location", Location), ("flags", c_int))


Uuid = ctypes.c_ubyte * 16
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(Handle), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "cuMemExportToShareableHandle": (c_void_p, Handle, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(Handle), c_void_p, c_int),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProperties), Handle),
    "cuMemRelease": (Handle,),
    "cuMemAddressReserve": (POINTER(Address), c_size_t, c_size_t, Address, c_ulonglong),
    "cuMemAddressFree": (Address, c_size_t),
    "cuMemMap": (Address, c_size_t, c_size_t, Handle, c_ulonglong),
    "cuMemSetAccess": (Address, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemUnmap": (Address, c_size_t),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (Address, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, Address, c_size_t, c_void_p),
}
