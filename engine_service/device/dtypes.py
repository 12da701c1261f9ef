"""Translates element types between settings, safetensors and the manifest. No torch."""

from __future__ import annotations

from engine_service.errors import UnsupportedModel
from relay_service.core.dtypes import DType

_SERVED = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
SERVED = frozenset(_SERVED.values())
"""Types that a model can compute in."""
_STORED = {
    "F64": DType.F64,
    "F32": DType.F32,
    "F16": DType.F16,
    "BF16": DType.BF16,
    "F8_E4M3": DType.F8_E4M3,
}


SCALES_SUFFIX = "_scale_inv"
"""What the name of the scales of a float8 matrix adds to its own."""


def served_dtype(name: str) -> DType:
    """Returns the type of the weights for a `RankConfig.dtype`. Raises `UnsupportedModel`."""
    if name not in _SERVED:
        raise UnsupportedModel(
            f"dtype {name} is not supported",
            field="dtype", found=name, expected=", ".join(_SERVED),
        )  # fmt: skip
    return _SERVED[name]


def stored_dtype(name: str) -> DType | None:
    """Returns the floating type that safetensors calls `name`; None for any other type."""
    return _STORED.get(name)
