"""The decoder of Llama and its kin, reading its weights where the arena holds them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine_service.core.expert_map import TURNS, ExpertMap, RankExperts
from engine_service.device.batch import Batch
from engine_service.device.config import ModelConfig
from engine_service.device.formats.layouts import PLAIN, Layout
from engine_service.device.formats.linear import Linear
from engine_service.device.kv_cache import KVCache
from engine_service.device.layers import Stage, embed_part, rms_norm
from engine_service.device.models.layer import DenseLayer, Layer, SparseLayer
from engine_service.device.parallel import NOBODY, Group, Groups


class Embedding(Stage):
    """Turns token ids into rows, and positions into rotations."""

    WEIGHTS = ("embed", "cos", "sin")
    TABLES = True

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], group: Group) -> None:
        self.group = group
        self.scale = config.embedding_scale
        self.embed = tensors["embed"]
        self.cos = tensors["rotary.cos"]
        self.sin = tensors["rotary.sin"]

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows `[tokens, hidden_size]` and both inputs of `rotate`."""
        hidden = self.group.all_reduce(embed_part(tokens, self.embed, self.group))
        if self.scale != 1:
            hidden = hidden * self.scale
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return hidden, cos.to(hidden.dtype).unsqueeze(1), sin.to(hidden.dtype).unsqueeze(1)


class Head(Stage):
    """Turns rows into logits."""

    WEIGHTS = ("norm", "weight")
    TABLES = True

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], group: Group, layout: Layout
    ) -> None:
        self.group = group
        self.norm = tensors["norm"]
        self.weight = Linear("head", layout.of_head, config.hidden_size, tensors)
        self.normalize = functools.partial(rms_norm, eps=config.norm_eps, offset=config.norm_offset)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits, float32 `[rows, vocab_size]`."""
        part = self.weight(self.normalize(hidden, self.norm))
        return self.group.gather(part).float()


class Llama:
    """A decoder, or one rank's part of it. Made of stages, each captured by itself."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        groups: Groups = NOBODY,
        layout: Layout = PLAIN,
        experts: RankExperts | None = None,
    ) -> None:
        """`config` has this rank's sizes, and the whole vocabulary; `tensors` its arena's.

        `experts` says where the experts lie; without it this rank holds all, in their order.
        """
        self.config = config
        if experts is None and config.moe:
            everything = ExpertMap.linear(config.moe.experts, list(range(config.layers)), 1)
            experts = RankExperts(everything, 0)
        count = config.moe.experts if config.moe else 0
        with torch.inference_mode(mode=False):
            self.placement = torch.zeros(
                config.layers, count, TURNS, dtype=torch.int64, device=tensors["embed"].device
            )
        self.lost: Tensor | None = None
        self.groups = groups
        self.embedding = Embedding(config, tensors, groups.tensor)
        self.layers = [
            self._layer(tensors, index, groups, layout, experts) for index in range(config.layers)
        ]
        self.head = Head(config, tensors, groups.tensor, layout)

    @property
    def state(self) -> dict[str, Tensor]:
        """Runtime state by name: what a pass reads that isn't weights, and no cache."""
        if not self.config.moe:
            return {}
        passed = {} if self.lost is None else {"experts.lost": self.lost}
        return {"experts.placement": self.placement} | passed

    def pass_over(self, lost: Mapping[int, Sequence[int]]) -> None:
        """Lets no row choose these experts, by layer; what is captured must be captured anew.

        Where there are none, a pass is as if there had never been any.
        """
        self.lost = None
        if lost:
            with torch.inference_mode(mode=False):
                self.lost = torch.zeros(
                    self.placement.shape[:2], dtype=torch.bool, device=self.placement.device
                )
            for layer, experts in lost.items():
                self.lost[layer, list(experts)] = True
        for index, each in enumerate(self.layers):
            if isinstance(each, SparseLayer):
                each.lost = None if self.lost is None else self.lost[index]

    def place(self, layer: int, experts: RankExperts) -> None:
        """Follows experts of a layer that lie otherwise by now, captured graphs included."""
        sparse = self.layers[layer]
        if isinstance(sparse, SparseLayer):
            sparse.rename(f"layer.{layer}.", experts.slots(layer))
            self._place(layer, experts)

    def matrices(self) -> Iterator[Linear]:
        """Yields every matrix that has a format."""
        for stage in self._stages:
            yield from (held for held in stage.held() if isinstance(held, Linear))

    def weights(self) -> Iterator[Tensor]:
        """Yields every weight that a pass reads, where it reads it."""
        for stage in self._stages:
            yield from stage.weights()

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Returns the logits of each sequence's next token, `[sequences, vocab_size]`."""
        return self.head.forward(self.hidden(batch, cache)[-batch.lengths.shape[0] :])

    def hidden(self, batch: Batch, cache: KVCache) -> Tensor:
        """Returns what the head reads, `[tokens, hidden_size]`."""
        hidden, cos, sin = self.embedding.forward(batch.tokens, batch.positions)
        for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
            hidden = layer.forward(
                hidden, cos, sin, keys, values, batch.slots, batch.tables, batch.lengths
            )
        return hidden

    @property
    def _stages(self) -> tuple[Stage, ...]:
        return (self.embedding, *self.layers, self.head)

    def _layer(
        self,
        tensors: Mapping[str, Tensor],
        index: int,
        groups: Groups,
        layout: Layout,
        experts: RankExperts | None,
    ) -> Layer:
        config = self.config
        if config.moe is None or experts is None or config.is_dense(index):
            return DenseLayer(config, tensors, index, groups, layout)
        self._place(index, experts)
        placement, slots = self.placement[index], experts.slots(index)
        return SparseLayer(config, tensors, index, groups, layout, config.moe, placement, slots)

    def _place(self, layer: int, experts: RankExperts) -> None:
        self.placement[layer].copy_(torch.tensor(experts.turns(layer)))
