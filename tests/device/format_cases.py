"""Every format, with the types that it can serve, and how far it may be off."""

import math

import pytest
import torch

from engine_service.device.formats.layouts import LAYOUTS, choose_layout
from engine_service.device.torch_dtypes import MANIFEST_DTYPES
from engine_service.errors import ConfigError


def serves(name, dtype):
    """Whether this processor can serve a format."""
    try:
        return choose_layout(name, MANIFEST_DTYPES[dtype], "cpu").name == name
    except ConfigError:
        return False


ERRORS = {
    ("plain", torch.float32): 1e-6,
    ("plain", torch.bfloat16): 2**-8,
    ("packed", torch.bfloat16): 2**-8,
    ("int8", torch.float32): 0.015,
    ("int8", torch.bfloat16): 0.015,
    ("int8", torch.float16): 0.015,
    ("fp8", torch.float32): 0.03,
    ("fp8", torch.bfloat16): 0.03,
    ("fp8", torch.float16): 0.03,
    ("fp8-ue8m0", torch.float32): 0.03,
    ("fp8-ue8m0", torch.bfloat16): 0.03,
    ("int4", torch.float32): 0.13,
    ("int4", torch.bfloat16): 0.13,
    ("int4", torch.float16): 0.13,
}
"""Largest error of a product, root mean square, as a part of the products themselves."""
CASES = [
    pytest.param(
        name, dtype, id=f"{name}-{MANIFEST_DTYPES[dtype]}",
        marks=pytest.mark.skipif(not serves(name, dtype), reason="not on this processor"),
    )
    for name, dtype in ERRORS
]  # fmt: skip
packs = pytest.mark.skipif(
    not serves("packed", torch.bfloat16), reason="this processor cannot pack"
)
rounds = pytest.mark.skipif(
    not serves("int8", torch.float32), reason="this processor has no products of int8"
)
QUANTISED = [one for one in CASES if LAYOUTS[one.values[0]].quantised]


def error(hidden, weight, found):
    """Returns the error of products of independent numbers, whose own size is their factors'."""
    expected = hidden.double() @ weight.double().T
    size = hidden.double().norm() * weight.double().norm() / math.sqrt(weight.shape[1])
    return float((found.double() - expected).norm() / size)
