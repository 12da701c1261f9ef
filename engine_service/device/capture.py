"""Traces one stage of a model into a flat graph of calls, and proves it right.

The stage runs once on `torch.fx` proxies in the place of its weights and inputs: they have
no sizes and no values, so a graph can hold neither, and a branch on one is refused.
Capturing takes milliseconds, needs no compiler to be imported (make_fx: 1.4 s of it), and
may go on while weights land.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from engine_service.device.layers import Stage
from engine_service.device.paths import attribute_path, storage_address
from engine_service.device.tolerance import relative_difference, tolerance
from engine_service.errors import CaptureError

Graph = Callable[..., Any]
_PROOF_ROWS = 64
_PROOF_NUMBERS = 1_000_003
_PROOF_ALIKE = 3


def trace(model: object, stage: Stage, inputs: int) -> fx.GraphModule:
    """Returns a function of the stage's weights and its `inputs`, free of the stage's Python.

    Raises `CaptureError` for a stage that cannot be traced, and for one that closes over
    a tensor, which is named by its path below `model`.
    """
    graph, count = fx.Graph(), len(stage.weights())
    tracer = _Tracer(graph, model, _name(stage))
    arguments: list[Any] = [
        fx.Proxy(graph.placeholder(f"x{n}"), tracer) for n in range(count + inputs)
    ]
    try:
        result = stage.bound(arguments[:count]).forward(*arguments[count:])
        graph.output(tracer.create_arg(result))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{_name(stage)} cannot be captured: {error}") from error
    return fx.GraphModule(torch.nn.Module(), graph)


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Appends every call to the graph and refuses a tensor that is no input of it."""

    def __init__(self, graph: fx.Graph, model: object, stage: str) -> None:
        super().__init__(graph)
        self._model = model
        self._stage = stage

    def create_arg(self, a: Any) -> Any:
        """Turns what a call is given into what its node holds."""
        if isinstance(a, Tensor):
            path = attribute_path(self._model, storage_address(a)) or "an unnamed tensor"
            raise CaptureError(
                f"the graph of the {self._stage} would hold {path} itself instead of "
                "reading the arena",
                tensor=path,
            )
        return super().create_arg(a)


def prove(stage: Stage, graph: Graph, cases: Iterable[Sequence[Tensor]]) -> None:
    """Compares a graph with its stage on inputs and random weights. Raises `CaptureError`."""
    weights = _random_weights(stage)
    rounded = (held.layout.tolerance for held in stage.held() if not isinstance(held, Tensor))
    limit = max((tolerance(stage.dtype), *rounded))
    for inputs in cases:
        expected = stage.bound(weights).forward(*inputs)
        found = graph(*weights, *inputs)
        if isinstance(expected, Tensor):
            expected, found = (expected,), (found,)
        for one, other in zip(expected, found, strict=True):
            if not relative_difference(one, other) <= limit:
                raise CaptureError(
                    f"the graph of the {_name(stage)} does not compute what eager does"
                )


def kinds(layers: Sequence[Stage]) -> dict[type[Stage], Stage]:
    """Returns the first layer of each class, whose graph stands for all of that class.

    Raises `CaptureError` for a layer that it cannot stand for.
    """
    first: dict[type[Stage], tuple[int, Stage]] = {}
    for index, layer in enumerate(layers):
        known, like = first.setdefault(type(layer), (index, layer))
        if _shapes(layer) != _shapes(like):
            raise CaptureError(f"layer {index} is not built like layer {known}", layer=str(index))
    return {kind: layer for kind, (_, layer) in first.items()}


def _shapes(layer: Stage) -> list[tuple[Any, ...]]:
    return [(w.shape, w.stride(), w.dtype) for w in layer.weights()]


def _random_weights(stage: Stage) -> list[Tensor]:
    """Of matrices of one shape few are drawn, in turn: a layer may have hundreds of experts."""
    drawn: dict[tuple[int, int], list[list[Tensor]]] = {}
    weights: list[Tensor] = []
    for held in stage.held():
        if isinstance(held, Tensor):
            weights.append(_random_like(held, stage))
            continue
        alike = drawn.setdefault(held.shape, [])
        if len(alike) < _PROOF_ALIKE:
            alike.append(held.holding(_random_matrix(held.shape, stage)))
        else:
            alike.append(alike.pop(0))
        weights += alike[-1]
    return weights


def _random_like(held: Tensor, stage: Stage) -> Tensor:
    """What isn't floating says where things lie, and stays as it is."""
    if not held.is_floating_point():
        return held
    return _random(_cut_short(tuple(held.shape), stage), held.dtype)


def _random_matrix(shape: tuple[int, int], stage: Stage) -> Tensor:
    return _random(_cut_short(shape, stage), stage.dtype)


def _cut_short(size: tuple[int, ...], stage: Stage) -> tuple[int, ...]:
    """Tables by token or position are cut short: the graph takes any number of rows."""
    if stage.TABLES and len(size) > 1:
        return (min(size[0], _PROOF_ROWS), *size[1:])
    return size


def _random(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers are repeated beyond a prime count, so that no two rows are alike."""
    count = math.prod(size)
    drawn = torch.rand(min(count, _PROOF_NUMBERS)).sub_(0.5).to(dtype)
    repeated = drawn.repeat(-(-count // len(drawn)))[:count] if count else drawn
    return repeated.view(size)


def _name(stage: Stage) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(stage).__name__).lower()
