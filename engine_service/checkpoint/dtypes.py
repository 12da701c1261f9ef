"""The dtypes that a checkpoint may be written in."""

from __future__ import annotations

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Size of one value."""

HEADER_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What the header of a safetensors file calls them."""
