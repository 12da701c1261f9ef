"""Element types that an arena can hold, by their safetensors-like names."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """Element type of a tensor. Sub-byte types are held packed, two in a byte."""

    BOOL = "bool"
    U8 = "u8"
    I8 = "i8"
    U16 = "u16"
    I16 = "i16"
    U32 = "u32"
    I32 = "i32"
    U64 = "u64"
    I64 = "i64"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    F8_E4M3 = "f8_e4m3"
    F8_E5M2 = "f8_e5m2"
    F8_E8M0 = "f8_e8m0"
    F4_E2M1X2 = "f4_e2m1x2"

    @property
    def itemsize(self) -> int:
        """Bytes of one element; of one packed pair for `F4_E2M1X2`."""
        return _ITEM_BYTES[self]


_ITEM_BYTES = {
    DType.BOOL: 1,
    DType.U8: 1,
    DType.I8: 1,
    DType.U16: 2,
    DType.I16: 2,
    DType.U32: 4,
    DType.I32: 4,
    DType.U64: 8,
    DType.I64: 8,
    DType.F16: 2,
    DType.BF16: 2,
    DType.F32: 4,
    DType.F64: 8,
    DType.F8_E4M3: 1,
    DType.F8_E5M2: 1,
    DType.F8_E8M0: 1,
    DType.F4_E2M1X2: 1,
}
