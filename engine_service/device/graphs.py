"""Captures the decode pass as flat graphs of calls, and replays them.

One layer of each kind is traced with its weights as inputs and then bound to the tensors
that each layer has in the arena: it follows an in-place copy and misses a rebinding,
exactly like a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from engine_service.core.step_messages import Row, Sampling
from engine_service.device import precompiled
from engine_service.device.batch import Batch, make_batch
from engine_service.device.capture import Graph, kinds, prove, trace
from engine_service.device.kv_cache import KVCache
from engine_service.device.layers import Stage
from engine_service.device.models.llama import Llama
from engine_service.device.parallel import rehearsing
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
        self._traced: list[fx.GraphModule] = []
        self._head: Graph | None = None
        self._layers: list[tuple[Graph, tuple[Tensor, ...], tuple[Tensor, Tensor]]] = []

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
        """The captured graph of every layer.

        Raises `CaptureError` before `capture`, and for layers that the compiler cannot follow.
        """
        if not self._traced:
            raise CaptureError("no graph has been captured yet")
        if not self._compiles:
            raise CaptureError("layers with experts, or of several kinds, are not compiled")
        return self._traced[0]

    @property
    def compiled_place(self) -> Path:
        """Where the layer's compiled twin is, or would be. Raises what `layer` does."""
        return precompiled.place_of(self.layer, self._model.layers[0].weights(), self._cache)

    def layer_example(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Returns what a compiled layer takes: like its weights, and the fewest rows of input."""
        *_, (_, inputs, *_) = self._examples()
        return self._model.layers[0].stand_ins(), inputs

    @torch.inference_mode()
    def capture(self) -> None:
        """Traces the stages, proves that replay equals eager, and binds the weights.

        Other ranks take no part: graphs hold names of groups, whoever is in these.

        Raises `CaptureError` naming a tensor that a graph would hold by itself, and for layers
        that differ from the first one of their kind.
        """
        with rehearsing(self._model.groups):
            self._capture()

    def _capture(self) -> None:
        model, cache = self._model, self._cache
        layers = kinds(model.layers)
        stages = (model.embedding, *layers.values(), model.head)
        first, *_ = cases = list(self._examples())
        graphs = [trace(model, *one) for one in zip(stages, map(len, first), strict=True)]
        for graph, stage, *inputs in zip(graphs, stages, *cases, strict=True):
            prove(stage, graph, inputs)
        self._traced = graphs[1:-1]
        by_kind: dict[type, Graph] = dict(zip(layers, self._traced, strict=True))
        if twin := self._compiled_twin():
            by_kind, self._least = dict.fromkeys(layers, twin), precompiled.LEAST
        self._layers = [
            (by_kind[type(layer)], tuple(layer.handed() if twin else layer.weights()), held)
            for layer, held in zip(model.layers, cache.layers, strict=True)
        ]
        self._embedding = _bind(graphs[0], model.embedding.weights())
        self._head = _bind(graphs[-1], model.head.weights())

    def replay(self, batch: Batch) -> Tensor:
        """Returns the logits of a decode batch of any size and any context.

        Raises `CaptureError` before `capture`.
        """
        if self._embedding is None or self._head is None:
            raise CaptureError("no graph has been captured yet")
        rows = len(batch.lengths)
        if self.compiled:
            batch = precompiled.roomy(batch, self._cache)
        hidden, cos, sin = self._embedding(batch.tokens, batch.positions)
        for layer, weights, (keys, values) in self._layers:
            hidden = layer(
                *weights, hidden, cos, sin, keys, values, batch.slots, batch.tables, batch.lengths
            )
        logits: Tensor = self._head(hidden[:rows])
        return logits

    @property
    def _compiles(self) -> bool:
        return len(self._traced) == 1 and self._model.layers[0].COMPILES

    def _compiled_twin(self) -> Graph | None:
        """Returns what replaces the layer's graph, proven equal; none where there is none."""
        if self._wanted == "off" or (self._wanted == "auto" and not self._compiles):
            return None
        layer, place = precompiled.load(self.compiled_place), self.compiled_place
        if layer:
            first = self._model.layers[0]
            prove(first, _of_stored(first, layer), [self.layer_example()[1]])
        elif self._wanted == "require":
            raise CaptureError(
                f"the layer has not been compiled for this machine: {place} isn't there",
                file=str(place), hint="run `seedrelay model compile` with the same settings",
            )  # fmt: skip
        return layer

    def _examples(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """Yields inputs of the stages for one row and for more, on scratch blocks."""
        for count in range(1, len(self._cache.scratch) + 1):
            rows = [Row((0,), 0, held, 0, Sampling()) for held in self._cache.scratch[:count]]
            batch = make_batch(rows, self._cache, self._model.config.vocab_size)
            yield self._inputs(precompiled.roomy(batch, self._cache) if count > 1 else batch)

    def _inputs(self, batch: Batch) -> list[tuple[Tensor, ...]]:
        """Returns inputs of each stage, with random rows in the place of computed ones."""
        config, dtype = self._model.config, self._cache.keys.dtype
        hidden = torch.rand(len(batch.tokens), config.hidden_size).to(dtype)
        angles = torch.rand(len(batch.tokens), 1, config.rotary_dim).to(dtype)
        layer = (hidden, angles, angles.clone(), *self._cache.layers[0])
        places = (batch.slots, batch.tables, batch.lengths)
        kinds_of_layers = len({type(layer) for layer in self._model.layers})
        layers = [(*layer, *places)] * kinds_of_layers
        return [(batch.tokens, batch.positions), *layers, (hidden,)]


def _of_stored(stage: Stage, compiled: Graph) -> Graph:
    """Returns a compiled stage that takes weights as they are stored."""
    count = len(stage.weights())

    def call(*inputs: Tensor) -> Any:
        return compiled(*stage.bound(inputs[:count]).handed(), *inputs[count:])

    return call


def _bind(graph: Graph, weights: Sequence[Tensor]) -> Graph:
    def call(*inputs: Tensor) -> Any:
        return graph(*weights, *inputs)

    return call
