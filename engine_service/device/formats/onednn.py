"""Matrices in the order in which oneDNN reads them, on memory that is not its own.

What oneDNN packs is normally memory of its own; here the bytes lie in the arena, where an
in-place copy reaches them, and a descriptor (an opaque tensor that owns nothing) says how
they are to be read. torch makes one through the C functions that its ahead-of-time compiler
uses for constants: `torch/csrc/inductor/aoti_torch/c/shim.h`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_service.errors import EngineError

_mkldnn = torch.ops.mkldnn


def write(packed: Tensor, stored: Tensor) -> None:
    """Copies a matrix that oneDNN has packed into an arena tensor, in place.

    Raises `EngineError` when it needs more bytes than were declared.
    """
    nbytes = _mkldnn._nbytes(packed)  # noqa: SLF001 - its only name
    if nbytes > stored.nbytes:
        raise EngineError(
            f"oneDNN packs {rows_of(stored)} rows into {nbytes} bytes, {stored.nbytes} are declared"
        )
    ctypes.memmove(stored.data_ptr(), _mkldnn.data_ptr(packed), nbytes)


def rows_of(stored: Tensor) -> int:
    """Returns the rows of the matrix that an arena tensor holds: see `Layout.of_parts`."""
    return math.prod(stored.shape[:-1])


def description(packed: Tensor) -> bytes:
    """Returns how oneDNN has ordered a packed matrix."""
    return bytes(_mkldnn._get_mkldnn_serialized_md(packed).numpy())  # noqa: SLF001 - its only name


def describe(address: int, shape: tuple[int, int], dtype: torch.dtype, order: bytes) -> Tensor:
    """Returns a matrix `[shape]` that reads whatever lies at an address, in a described order."""
    library, handle = _library(), ctypes.c_void_p()
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(*shape),
        (ctypes.c_int64 * 2)(shape[1], 1),
        ctypes.c_int64(0),
        ctypes.c_int32(_dtype_code(dtype)),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        order,
        ctypes.c_int64(len(order)),
    )
    if status:
        raise EngineError(f"torch cannot describe a packed matrix {list(shape)}")
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))  # noqa: SLF001 - its only name
    return tensor


def _dtype_code(dtype: torch.dtype) -> int:
    name = str(dtype).removeprefix("torch.")
    code: int = getattr(_library(), f"aoti_torch_dtype_{name}")()
    return code


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _capsule(handle: ctypes.c_void_p) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p,
    )  # fmt: skip
    return new(handle, None, None)
