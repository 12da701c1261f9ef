"""Captures the decode pass as flat graphs of calls, and replays them.

One layer is traced with its weights as inputs and then bound to each layer's tensors
in the arena: it follows an in-place copy and misses a rebinding,
exactly like a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from engine_service.core.messages import Row, Sampling
from engine_service.device import precompiled
from engine_service.device.batch import Batch, make_batch
from engine_service.device.capture import Graph, check_uniform, prove, trace
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.errors import CaptureError


class GraphRunner:
    """Owns the captured graphs of one model."""

    proven = True

    def __init__(self, model: Llama, cache: KVCache, *, compiled: str = "off") -> None:
        """`compiled`: `off`, `auto` for a compiled layer where there is one, `require` it."""
        self._model = model
        self._cache = cache
        self._wanted = compiled
        self._least = 1
        self._embedding: Graph | None = None
        self._traced: fx.GraphModule | None = None
        self._layer: Graph | None = None
        self._head: Graph | None = None
        self._bound: list[tuple[Tensor, ...]] = []

    @property
    def captured(self) -> bool:
        """Whether `replay` may be called."""
        return self._head is not None

    @property
    def compiled(self) -> bool:
        """Whether a compiled layer is replayed."""
        return self._least > 1

    @property
    def layer(self) -> fx.GraphModule:
        """The captured graph of a layer. Raises `CaptureError` before `capture`."""
        if self._traced is None:
            raise CaptureError("no graph has been captured yet")
        return self._traced

    @property
    def compiled_place(self) -> Path:
        """Where the layer's compiled twin is, or would be."""
        return precompiled.place_of(self.layer, self._model.layers[0].weights(), self._cache)

    def layer_example(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Returns a layer's weights, and inputs of the fewest rows that a compiled one takes."""
        *_, (_, inputs, _) = self._examples()
        return self._model.layers[0].weights(), inputs

    @torch.inference_mode()
    def capture(self) -> None:
        """Traces the stages, proves that replay equals eager, and binds the weights.

        Raises `CaptureError` naming a tensor that a graph would hold by itself, and
        for layers that differ from the first one.
        """
        model, cache = self._model, self._cache
        check_uniform(model.layers)
        stages = (model.embedding, model.layers[0], model.head)
        cases = [list(zip(stages, inputs, strict=True)) for inputs in self._examples()]
        graphs = [trace(model, stage, len(inputs)) for stage, inputs in cases[0]]
        for case in cases:
            for graph, (stage, inputs) in zip(graphs, case, strict=True):
                prove(stage, graph, inputs)
        self._embedding = _bind(graphs[0], model.embedding.weights())
        self._traced, self._layer = graphs[1], graphs[1]
        self._take_compiled()
        self._head = _bind(graphs[2], model.head.weights())
        bound = zip(model.layers, cache.layers, strict=True)
        self._bound = [(*stage.weights(), *held) for stage, held in bound]

    def replay(self, batch: Batch) -> Tensor:
        """Returns the logits of a decode batch of any size and any context.

        Raises `CaptureError` before `capture`.
        """
        if self._embedding is None or self._layer is None or self._head is None:
            raise CaptureError("no graph has been captured yet")
        layer, rows = self._layer, len(batch.lengths)
        if self.compiled:
            batch = precompiled.roomy(batch, self._cache)
        hidden, cos, sin = self._embedding(batch.tokens, batch.positions)
        for weights in self._bound:
            stage, (keys, values) = weights[:-2], weights[-2:]
            hidden = layer(
                *stage, hidden, cos, sin, keys, values, batch.slots, batch.tables, batch.lengths
            )
        logits: Tensor = self._head(hidden[:rows])
        return logits

    def _take_compiled(self) -> None:
        """Replaces the layer's graph by its compiled twin, once that is proven equal."""
        if self._wanted == "off":
            return
        layer, place = precompiled.load(self.compiled_place), self.compiled_place
        if layer:
            prove(self._model.layers[0], layer, self.layer_example()[1])
            self._layer, self._least = layer, precompiled.LEAST
        elif self._wanted == "require":
            raise CaptureError(
                f"the layer has not been compiled for this machine: {place} isn't there",
                file=str(place), hint="run `seedrelay model compile` with the same settings",
            )  # fmt: skip

    def _examples(self) -> Iterator[tuple[tuple[Tensor, ...], ...]]:
        """Yields inputs of the stages for one row and for more, on scratch blocks."""
        for count in range(1, len(self._cache.scratch) + 1):
            rows = [Row((0,), 0, held, 0, Sampling()) for held in self._cache.scratch[:count]]
            batch = make_batch(rows, self._cache, self._model.config.vocab_size)
            yield self._inputs(precompiled.roomy(batch, self._cache) if count > 1 else batch)

    def _inputs(self, batch: Batch) -> tuple[tuple[Tensor, ...], ...]:
        """Returns inputs of each stage, with random rows in the place of computed ones."""
        config, dtype = self._model.config, self._cache.keys.dtype
        hidden = torch.rand(len(batch.tokens), config.hidden_size).to(dtype)
        angles = torch.rand(len(batch.tokens), 1, config.head_dim).to(dtype)
        layer = (hidden, angles, angles.clone(), *self._cache.layers[0])
        places = (batch.slots, batch.tables, batch.lengths)
        return (batch.tokens, batch.positions), (*layer, *places), (hidden,)


def _bind(graph: Graph, weights: Sequence[Tensor]) -> Graph:
    def call(*inputs: Tensor) -> Any:
        return graph(*weights, *inputs)

    return call
