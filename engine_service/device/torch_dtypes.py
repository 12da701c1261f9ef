"""Translates element types of the manifest to those of torch, and tensors to bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from relay_service.core.dtypes import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.U16: torch.uint16,
    DType.I16: torch.int16,
    DType.U32: torch.uint32,
    DType.I32: torch.int32,
    DType.U64: torch.uint64,
    DType.I64: torch.int64,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.F4_E2M1X2: torch.float4_e2m1fn_x2,
}
MANIFEST_DTYPES = {found: dtype for dtype, found in TORCH_DTYPES.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor of the host, without a copy."""
    return tensor.view(torch.uint8).flatten().numpy().data
