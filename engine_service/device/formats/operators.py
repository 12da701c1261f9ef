"""Products that a traced graph holds as one call, and what the compiler gets for each."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import handle_torch_function, has_torch_function

Product = Callable[..., Tensor]
_library = torch.library.Library("seedrelay", "FRAGMENT")  # type: ignore[no-untyped-call]
_compiled: dict[Any, Any] = {}


def leaf(compiled: Product) -> Callable[[Product], Product]:
    """Wraps a product of input and arena tensors, in whose place `compiled` is compiled."""

    def wrap(product: Product) -> Product:
        @functools.wraps(product)
        def called(*tensors: Tensor) -> Tensor:
            if has_torch_function(tensors):  # being traced
                found: Tensor = handle_torch_function(called, tensors, *tensors)
                return found
            return product(*tensors)

        _compiled[called] = compiled
        return called

    return wrap


def opaque(name: str, stored: int = 1) -> Callable[[Product], Product]:
    """Wraps a product that the compiler calls and doesn't look into.

    Of input and so many arena tensors, the first of which has its rows.
    """

    def wrap(product: Product) -> Product:
        held = ", ".join(f"Tensor stored{number}" for number in range(stored))
        _library.define(f"{name}(Tensor hidden, {held}) -> Tensor")  # type: ignore[no-untyped-call]
        _library.impl(name, product, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"seedrelay::{name}", _shaped, lib=_library)
        return leaf(getattr(torch.ops.seedrelay, name).default)(product)

    return wrap


def for_compiler(graph: fx.Graph, others: Mapping[Any, Any]) -> fx.Graph:
    """Returns a copy of a graph that the compiler can follow; of `others` too it gets the value."""
    copied, known = copy.deepcopy(graph), _compiled | dict(others)
    for node in copied.nodes:
        if node.op == "call_function":
            node.target = known.get(node.target, node.target)
    return copied


def _shaped(hidden: Tensor, first: Tensor, *_: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], math.prod(first.shape[:-1]))
