"""Tiles in the order in which oneDNN's matrix product reads them.

oneDNN would repack a plain matrix in every product. What it packs once is normally memory
of its own; here the bytes lie in the arena, where an in-place copy reaches them, and a
descriptor (an opaque tensor that owns nothing) says how they are to be read. torch makes one
through the C functions that its ahead-of-time compiler uses for constants:
`torch/csrc/inductor/aoti_torch/c/shim.h`.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import handle_torch_function, has_torch_function

from engine_service.errors import EngineError

_mkldnn = torch.ops.mkldnn
_library = torch.library.Library("seedrelay", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_product(Tensor hidden, Tensor packed) -> Tensor")  # type: ignore[no-untyped-call]


def process(weight: Tensor, stored: Sequence[Tensor]) -> None:
    """Packs a matrix. See `Kernel`."""
    packed = stored[0]
    tiles = _mkldnn._reorder_linear_weight(weight.to(packed.dtype).contiguous())  # noqa: SLF001 - its only name
    nbytes = _fitting(_mkldnn._nbytes(tiles), packed)  # noqa: SLF001 - as above
    ctypes.memmove(packed.data_ptr(), _mkldnn.data_ptr(tiles), nbytes)


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, stored[0])


def with_operators(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of a graph whose products the compiler can pass over."""
    copied = copy.deepcopy(graph)
    for node in copied.nodes:
        if node.target is _product:
            node.target = torch.ops.seedrelay.packed_product.default
    return copied


def _product(hidden: Tensor, packed: Tensor) -> Tensor:
    if has_torch_function((hidden, packed)):  # being traced: one call in the graph
        return handle_torch_function(_product, (hidden, packed), hidden, packed)
    tiles = _tiles(packed.data_ptr(), packed.shape[0], hidden.shape[-1], packed.dtype)
    product: Tensor = _mkldnn._linear_pointwise.default(hidden, tiles, None, "none", [], "")  # noqa: SLF001 - its only name
    return product


def _product_shape(hidden: Tensor, packed: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], packed.shape[0])


@functools.lru_cache(maxsize=1 << 16)
def _tiles(address: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns a descriptor of a packed matrix at an address: whatever lies there is read."""
    description = _description(rows, columns, dtype)
    handle = ctypes.c_void_p()
    status = _torch_cpu().aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(rows, columns),
        (ctypes.c_int64 * 2)(columns, 1),
        ctypes.c_int64(0),
        ctypes.c_int32(_dtype_code(dtype)),
        ctypes.c_int32(_torch_cpu().aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(_torch_cpu().aoti_torch_layout__mkldnn()),
        description,
        ctypes.c_int64(len(description)),
    )
    if status:
        raise EngineError(f"torch cannot describe a packed matrix [{rows}, {columns}]")
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))  # noqa: SLF001 - its only name
    return tensor


@functools.lru_cache(maxsize=256)
def _description(rows: int, columns: int, dtype: torch.dtype) -> bytes:
    """Returns how oneDNN orders the tiles of a matrix of this size on this machine."""
    tiles = _mkldnn._reorder_linear_weight(torch.empty(rows, columns, dtype=dtype))  # noqa: SLF001 - its only name
    return bytes(_mkldnn._get_mkldnn_serialized_md(tiles).numpy())  # noqa: SLF001 - as above


def _fitting(nbytes: int, packed: Tensor) -> int:
    if nbytes > packed.nbytes:
        raise EngineError(
            f"oneDNN packs {packed.shape[0]} rows into {nbytes} bytes, {packed.nbytes} are declared"
        )
    return nbytes


def _dtype_code(dtype: torch.dtype) -> int:
    name = str(dtype).removeprefix("torch.")
    code: int = getattr(_torch_cpu(), f"aoti_torch_dtype_{name}")()
    return code


@functools.cache
def _torch_cpu() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _capsule(handle: ctypes.c_void_p) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p,
    )  # fmt: skip
    return new(handle, None, None)


_library.impl("packed_product", _product, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("seedrelay::packed_product", _product_shape, lib=_library)
