"""Captures the decode pass as flat graphs of ATen calls, and replays them.

One layer is traced symbolically with its weights as inputs and then bound to each
layer's tensors in the arena: it follows an in-place copy and misses a rebinding,
exactly like a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine_service.core.messages import Row, Sampling
from engine_service.device.batch import Batch, make_batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.layers import Stage
from engine_service.device.models.llama import Llama
from engine_service.device.paths import attribute_path, storage_address
from engine_service.device.tolerance import relative_difference, tolerance
from engine_service.errors import CaptureError

_Graph = Callable[..., Any]


class GraphRunner:
    """Owns the captured graphs of one model."""

    def __init__(self, model: Llama, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._embedding: _Graph | None = None
        self._layer: _Graph | None = None
        self._head: _Graph | None = None
        self._bound: list[tuple[Tensor, ...]] = []

    @property
    def captured(self) -> bool:
        """Whether `replay` may be called."""
        return self._head is not None

    def capture(self) -> None:
        """Traces the stages, binds them and proves that replay equals eager.

        Raises `CaptureError` naming a tensor that a graph would hold by itself, and
        for layers that differ from the first one.
        """
        model, cache = self._model, self._cache
        _check_uniform(model.layers)
        batch = self._example_batch()
        with torch.no_grad():
            rows = model.embedding.forward(batch.tokens, batch.positions)
            layer_inputs = (*rows, *cache.layers[0], batch.slots, batch.tables, batch.lengths)
            embedding = _trace(model, model.embedding, (batch.tokens, batch.positions))
            layer = _trace(model, model.layers[0], layer_inputs)
            head = _trace(model, model.head, rows[:1])
        self._embedding = _bind(embedding, model.embedding.weights())
        self._layer = layer
        self._head = _bind(head, model.head.weights())
        bound = zip(model.layers, cache.layers, strict=True)
        self._bound = [(*stage.weights(), *held) for stage, held in bound]
        self._prove()

    def replay(self, batch: Batch) -> Tensor:
        """Returns the logits of a decode batch of any size and any context.

        Raises `CaptureError` before `capture`.
        """
        if self._embedding is None or self._layer is None or self._head is None:
            raise CaptureError("no graph has been captured yet")
        layer = self._layer
        hidden, cos, sin = self._embedding(batch.tokens, batch.positions)
        for weights in self._bound:
            stage, (keys, values) = weights[:-2], weights[-2:]
            hidden = layer(
                *stage, hidden, cos, sin, keys, values, batch.slots, batch.tables, batch.lengths
            )
        logits: Tensor = self._head(hidden)
        return logits

    def _example_batch(self) -> Batch:
        """Returns a batch whose size stands for nothing else.

        Tracing takes equal sizes for the same size, so a batch of 3 in a model with 3
        heads would tie one to the other.
        """
        stages = (self._model.embedding, self._model.layers[0], self._model.head)
        taken = {size for stage in stages for weight in stage.weights() for size in weight.shape}
        taken |= set(self._cache.keys.shape)
        free = (size for size in range(5, 1 << 24) if size not in taken)
        count, width = next(free), next(free)
        zeros = torch.zeros(count, dtype=torch.int64)
        tables = torch.full((count, width), self._cache.padding_block)
        return Batch(zeros, zeros.clone(), zeros.clone(), tables, zeros + 1)

    def _prove(self) -> None:
        """Compares replay and eager on scratch blocks, for one sequence and for several."""
        vocab, cache = self._model.config.vocab_size, self._cache
        limit = tolerance(self._model.embedding.embed.dtype)
        for count in range(1, len(cache.scratch) + 1):
            rows = [
                Row((1 % vocab,), 0, blocks, 0, Sampling()) for blocks in cache.scratch[:count]
            ]  # fmt: skip
            with torch.inference_mode():
                batch = make_batch(rows, cache, vocab)
                eager, replayed = self._model.forward(batch, cache), self.replay(batch)
            if eager.isfinite().all() and not relative_difference(eager, replayed) <= limit:
                raise CaptureError(f"replay differs from eager for a batch of {count}")


def _trace(model: Llama, stage: Stage, inputs: Sequence[Tensor]) -> _Graph:
    # Pulls in sympy and torch's compiler: seconds that only a capture needs.
    from torch.fx.experimental.proxy_tensor import make_fx

    count = len(stage.WEIGHTS)

    def call(*arguments: Tensor) -> Any:
        return stage.bound(arguments[:count]).forward(*arguments[count:])

    name = type(stage).__name__.lower()
    traced = make_fx(call, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)
    try:
        graph = traced(*stage.weights(), *inputs)
    except Exception as error:
        raise CaptureError(f"{name} cannot be captured: {error}") from error
    _refuse_constants(model, name, graph)
    forward: _Graph = graph.forward
    return forward


def _refuse_constants(model: Llama, name: str, graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            path = attribute_path(model, storage_address(constant)) or "an unnamed tensor"
            raise CaptureError(
                f"the graph of the {name} would hold {path} itself instead of reading the arena",
                tensor=path,
            )


def _check_uniform(layers: Sequence[Stage]) -> None:
    kinds = [[(w.shape, w.stride(), w.dtype) for w in layer.weights()] for layer in layers]
    for index, layer in enumerate(layers):
        if type(layer) is not type(layers[0]) or kinds[index] != kinds[0]:
            raise CaptureError(f"layer {index} is not built like layer 0", layer=str(index))


def _bind(graph: _Graph, weights: Sequence[Tensor]) -> _Graph:
    def call(*inputs: Tensor) -> Any:
        return graph(*weights, *inputs)

    return call
