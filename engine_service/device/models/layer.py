"""The layers of a decoder: attention, then one feed-forward or experts."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine_service.device.attention import paged_attention
from engine_service.device.config import ModelConfig
from engine_service.device.experts import Slot, choose, mix
from engine_service.device.formats.layouts import Layout
from engine_service.device.formats.linear import Linear
from engine_service.device.layers import Stage, gated, plus, rms_norm, rotate
from engine_service.device.models.routing import MoE
from engine_service.device.parallel import ALONE, Group, Groups


class Layer(Stage):
    """Attention, then a feed-forward, each on normalised input."""

    WEIGHTS: ClassVar[tuple[str, ...]] = (
        "input_norm", "qkv", "qkv_bias", "output", "output_bias", "query_norm", "key_norm",
        "post_norm",
    )  # fmt: skip
    input_norm: Tensor
    qkv: Linear
    qkv_bias: Tensor | None
    output: Linear
    output_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_norm: Tensor

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        index: int,
        groups: Groups,
        layout: Layout,
    ) -> None:
        """`config` has this rank's sizes."""
        self.groups = groups
        self.normalize = functools.partial(rms_norm, eps=config.norm_eps, offset=config.norm_offset)
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        self.heads, self.kv_heads = config.heads, config.kv_heads
        own = f"layer.{index}."
        for name in self.WEIGHTS:
            setattr(self, name, tensors.get(own + name))
        self.qkv = Linear(f"{own}qkv", layout, config.hidden_size, tensors)
        columns = config.heads * config.head_dim
        self.output = Linear(f"{own}output", layout, columns, tensors, groups.tensor)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor, tables: Tensor, lengths: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns the next rows `[tokens, hidden_size]`; for the rest see `paged_attention`."""
        fused = plus(self.qkv(self.normalize(hidden, self.input_norm)), self.qkv_bias)
        by_head = fused.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        query_key, value = _split(by_head, 1, self.heads + self.kv_heads)
        query, key = _split(self._rotated(query_key, cos, sin), 1, self.heads)
        attended = paged_attention(query, key, value, keys, values, slots, tables, lengths)
        output = self.groups.tensor.all_reduce(self.output(attended.flatten(1)))
        hidden = hidden + plus(output, self.output_bias)
        return hidden + self.feed_forward(self.normalize(hidden, self.post_norm))

    @abstractmethod
    def feed_forward(self, normed: Tensor) -> Tensor:
        """Returns what is added to the rows, `[tokens, hidden_size]`, the same on all ranks."""

    def _rotated(self, query_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _split(query_key, 1, self.heads)
            normed = self.normalize(query, self.query_norm), self.normalize(key, self.key_norm)
            query_key = torch.cat(normed, 1)
        if self.rotary_dim == self.head_dim:
            return rotate(query_key, cos, sin)
        rotated, rest = _split(query_key, 2, self.rotary_dim)
        return torch.cat((rotate(rotated, cos, sin), rest), 2)


class DenseLayer(Layer):
    """A layer with one feed-forward for all tokens."""

    WEIGHTS: ClassVar[tuple[str, ...]] = (
        *Layer.WEIGHTS,
        "gate_up",
        "gate_up_bias",
        "down",
        "down_bias",
    )
    gate_up: Linear
    gate_up_bias: Tensor | None
    down: Linear
    down_bias: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        index: int,
        groups: Groups,
        layout: Layout,
    ) -> None:
        super().__init__(config, tensors, index, groups, layout)
        self.gate_up, self.down = _mlp(
            f"layer.{index}.", config.hidden_size, config.ffn_size, tensors, layout, groups.tensor
        )
        self.activation = config.activation

    def feed_forward(self, normed: Tensor) -> Tensor:
        """See `Layer`."""
        gate_up = plus(self.gate_up(normed), self.gate_up_bias)
        down = self.groups.tensor.all_reduce(self.down(gated(gate_up, self.activation)))
        return plus(down, self.down_bias)


class SparseLayer(Layer):
    """A layer whose tokens choose among experts; shared ones serve every token."""

    WEIGHTS: ClassVar[tuple[str, ...]] = (
        *Layer.WEIGHTS, "router", "correction", "shared_gate_up", "shared_down", "shared_gate",
        "placement", "lost", "experts",
    )  # fmt: skip
    COMPILES = False
    router: Tensor
    correction: Tensor | None
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    shared_gate: Tensor | None
    placement: Tensor
    lost: Tensor | None = None
    """Experts that rows pass over, while there are some: see `choose`."""
    experts: tuple[Slot, ...]

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        index: int,
        groups: Groups,
        layout: Layout,
        moe: MoE,
        placement: Tensor,
        slots: Sequence[int],
    ) -> None:
        """`placement` is registered state: see `mix`. `slots` names the expert in each."""
        super().__init__(config, tensors, index, groups, layout)
        own, hidden = f"layer.{index}.", config.hidden_size
        self.moe, self.placement = moe, placement
        self.shared_gate_up = self.shared_down = None
        if moe.shared_ffn_size:
            self.shared_gate_up, self.shared_down = _mlp(
                f"{own}shared_", hidden, moe.shared_ffn_size, tensors, layout, groups.tensor
            )
        self.experts = tuple(
            expert_slot(f"{own}expert.{expert}", config, tensors, layout, groups.tensor)
            for expert in slots
        )

    def rename(self, own: str, slots: Sequence[int]) -> None:
        """Follows experts that were moved: `slots` names the one in each, `own` the layer."""
        for expert, (gate_up, down) in zip(slots, self.experts, strict=True):
            gate_up.rename(f"{own}expert.{expert}.gate_up")
            down.rename(f"{own}expert.{expert}.down")

    def feed_forward(self, normed: Tensor) -> Tensor:
        """See `Layer`. All ranks choose alike, and each computes its part of what it holds.

        Of groups that all hold the shared experts, the first alone adds them.
        """
        logits = functional.linear(normed.float(), self.router)
        chosen, weights = choose(logits, self.correction, self.moe, self.lost)
        partial = mix(normed, chosen, weights, self.placement, self.experts)
        shares = self.groups.world.rank < self.groups.tensor.ranks
        if shares and self.shared_gate_up is not None and self.shared_down is not None:
            shared = self.shared_down(gated(self.shared_gate_up(normed)))
            if self.shared_gate is not None:
                share = functional.linear(normed.float(), self.shared_gate).sigmoid()
                shared = shared * share.to(shared.dtype)
            partial = partial + shared
        return self.groups.world.all_reduce(partial)


def expert_slot(
    unit: str, config: ModelConfig, tensors: Mapping[str, Tensor], layout: Layout,
    group: Group = ALONE,
) -> Slot:  # fmt: skip
    """Finds the matrices of an expert; `config` has the sizes of a rank's part of it."""
    ffn_size = config.moe.ffn_size if config.moe else config.ffn_size
    return _mlp(f"{unit}.", config.hidden_size, ffn_size, tensors, layout, group)


def _mlp(
    own: str, hidden: int, ffn_size: int, tensors: Mapping[str, Tensor], layout: Layout,
    group: Group,
) -> Slot:  # fmt: skip
    gate_up = Linear(f"{own}gate_up", layout, hidden, tensors)
    return gate_up, Linear(f"{own}down", layout, ffn_size, tensors, group)


def _split(heads: Tensor, dim: int, first: int) -> tuple[Tensor, Tensor]:
    return heads.narrow(dim, 0, first), heads.narrow(dim, first, heads.shape[dim] - first)
