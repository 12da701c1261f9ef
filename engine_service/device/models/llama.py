"""The decoder of the Llama family, reading its weights where the arena holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine_service.device.attention import paged_attention
from engine_service.device.batch import Batch
from engine_service.device.config import ModelConfig
from engine_service.device.formats.layouts import PLAIN, Layout
from engine_service.device.formats.linear import Linear
from engine_service.device.kv_cache import KVCache
from engine_service.device.layers import Stage, embed_part, rms_norm, rotate, swiglu
from engine_service.device.parallel import ALONE, Group


class Embedding(Stage):
    """Turns token ids into rows, and positions into rotations."""

    WEIGHTS = ("embed", "cos", "sin")
    TABLES = True

    def __init__(self, tensors: Mapping[str, Tensor], group: Group) -> None:
        self.group = group
        self.embed = tensors["embed"]
        self.cos = tensors["rotary.cos"]
        self.sin = tensors["rotary.sin"]

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows `[tokens, hidden_size]` and both inputs of `rotate`."""
        hidden = self.group.all_reduce(embed_part(tokens, self.embed, self.group))
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return hidden, cos.to(hidden.dtype).unsqueeze(1), sin.to(hidden.dtype).unsqueeze(1)


class Layer(Stage):
    """Attention, then a gated feed-forward, each on normalised input."""

    WEIGHTS = ("input_norm", "qkv", "output", "post_norm", "gate_up", "down")

    input_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        index: int,
        group: Group,
        layout: Layout,
    ) -> None:
        """`config` has this rank's sizes."""
        self.group = group
        prefix, hidden = f"layer.{index}.", config.hidden_size
        self.input_norm = tensors[prefix + "input_norm"]
        self.post_norm = tensors[prefix + "post_norm"]
        for name, columns in (
            ("qkv", hidden),
            ("output", config.heads * config.head_dim),
            ("gate_up", hidden),
            ("down", config.ffn_size),
        ):
            setattr(self, name, Linear(prefix + name, layout, columns, tensors))
        self.eps = config.norm_eps
        self.head_dim = config.head_dim
        self.heads = config.heads
        self.kv_heads = config.kv_heads

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor, tables: Tensor, lengths: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns the next rows `[tokens, hidden_size]`; for the rest see `paged_attention`."""
        fused = self.qkv(rms_norm(hidden, self.input_norm, self.eps))
        by_head = fused.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        query_key, value = _split(by_head, self.heads + self.kv_heads)
        query, key = _split(rotate(query_key, cos, sin), self.heads)
        attended = paged_attention(query, key, value, keys, values, slots, tables, lengths)
        hidden = hidden + self.group.all_reduce(self.output(attended.flatten(1)))
        gate_up = self.gate_up(rms_norm(hidden, self.post_norm, self.eps))
        return hidden + self.group.all_reduce(self.down(swiglu(gate_up)))


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
        self.eps = config.norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits, float32 `[rows, vocab_size]`."""
        part = self.weight(rms_norm(hidden, self.norm, self.eps))
        return self.group.gather(part).float()


class Llama:
    """A decoder, or one rank's part of it. Made of stages, each captured by itself."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        group: Group = ALONE,
        layout: Layout = PLAIN,
    ) -> None:
        """`config` has this rank's sizes, and the whole vocabulary; `tensors` its arena's."""
        self.config = config
        self.embedding = Embedding(tensors, group)
        self.layers = [
            Layer(config, tensors, index, group, layout) for index in range(config.layers)
        ]
        self.head = Head(config, tensors, group, layout)

    def matrices(self) -> Iterator[Linear]:
        """Yields every matrix that has a format."""
        for stage in (self.embedding, *self.layers, self.head):
            yield from (held for held in stage.held() if isinstance(held, Linear))

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


def _split(heads: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return heads.narrow(1, 0, first), heads.narrow(1, first, heads.shape[1] - first)
