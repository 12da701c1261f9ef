"""Products that nobody looks into: one call in a traced graph, one operator to the compiler."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import handle_torch_function, has_torch_function

Product = Callable[..., Tensor]
_library = torch.library.Library("seedrelay", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators: dict[Any, Any] = {}


def opaque(name: str, stored: int = 1) -> Callable[[Product], Product]:
    """Wraps a product of input and so many arena tensors; the first says its rows: `Layout`."""

    def wrap(product: Product) -> Product:
        @functools.wraps(product)
        def called(*tensors: Tensor) -> Tensor:
            if has_torch_function(tensors):  # being traced
                found: Tensor = handle_torch_function(called, tensors, *tensors)
                return found
            return product(*tensors)

        held = ", ".join(f"Tensor stored{number}" for number in range(stored))
        _library.define(f"{name}(Tensor hidden, {held}) -> Tensor")  # type: ignore[no-untyped-call]
        _library.impl(name, product, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"seedrelay::{name}", _shaped, lib=_library)
        _operators[called] = getattr(torch.ops.seedrelay, name).default
        return called

    return wrap


def with_operators(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of a graph whose products the compiler can pass over."""
    copied = copy.deepcopy(graph)
    for node in copied.nodes:
        if node.op == "call_function":
            node.target = _operators.get(node.target, node.target)
    return copied


def _shaped(hidden: Tensor, first: Tensor, *_: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], math.prod(first.shape[:-1]))
