"""Traces one stage of a model into a flat graph of ATen calls, and proves it right.

The weights are inputs of the graph. Nothing here reads the values of the arena, so
capturing and landing weights may go on at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine_service.device.layers import Stage
from engine_service.device.paths import attribute_path, storage_address
from engine_service.device.tolerance import relative_difference, tolerance
from engine_service.errors import CaptureError

Graph = Callable[..., Any]
_PROOF_ROWS = 64


def trace(model: object, stage: Stage, inputs: Sequence[Tensor]) -> Graph:
    """Returns a function of the stage's weights and inputs, free of the stage's Python.

    Raises `CaptureError` for a stage that cannot be traced, and for one that closes over
    a tensor, which is named by its path below `model`.
    """
    # Pulls in sympy and torch's compiler: seconds that only a capture needs.
    from torch.fx.experimental.proxy_tensor import make_fx

    count = len(stage.WEIGHTS)

    def call(*arguments: Tensor) -> Any:
        return stage.bound(arguments[:count]).forward(*arguments[count:])

    # Before composite operators are taken apart: fewer calls, and those that eager makes.
    tracer = make_fx(
        call, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True
    )  # fmt: skip
    try:
        with torch.no_grad():
            graph = tracer(*stage.weights(), *inputs)
    except Exception as error:
        raise CaptureError(f"{_name(stage)} cannot be captured: {error}") from error
    _refuse_constants(model, stage, graph)
    forward: Graph = graph.forward
    return forward


def prove(stage: Stage, graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Compares a graph with its stage on random weights. Raises `CaptureError`."""
    weights = [_random_like(weight, stage) for weight in stage.weights()]
    expected = stage.bound(weights).forward(*inputs)
    found = graph(*weights, *inputs)
    if isinstance(expected, Tensor):
        expected, found = (expected,), (found,)
    for one, other in zip(expected, found, strict=True):
        if not relative_difference(one, other) <= tolerance(weights[0].dtype):
            raise CaptureError(f"the graph of the {_name(stage)} does not compute what eager does")


def check_uniform(layers: Sequence[Stage]) -> None:
    """Raises `CaptureError` for a layer that the first one's graph cannot stand for."""
    kinds = [[(w.shape, w.stride(), w.dtype) for w in layer.weights()] for layer in layers]
    for index, layer in enumerate(layers):
        if type(layer) is not type(layers[0]) or kinds[index] != kinds[0]:
            raise CaptureError(f"layer {index} is not built like layer 0", layer=str(index))


def _refuse_constants(model: object, stage: Stage, graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            path = attribute_path(model, storage_address(constant)) or "an unnamed tensor"
            raise CaptureError(
                f"the graph of the {_name(stage)} would hold {path} itself instead of "
                "reading the arena",
                tensor=path,
            )


def _random_like(weight: Tensor, stage: Stage) -> Tensor:
    """Tables by token or position are cut short: the graph takes any number of rows."""
    rows = min(len(weight), _PROOF_ROWS) if stage.TABLES and weight.dim() > 1 else len(weight)
    return torch.rand(rows, *weight.shape[1:]).sub_(0.5).to(weight.dtype)


def _name(stage: Stage) -> str:
    return type(stage).__name__.lower()
