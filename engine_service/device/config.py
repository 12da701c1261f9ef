"""Reads a `config.json` into what decides layout and meaning of a decoder's weights."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_service.device.formats.layouts import BLOCK
from engine_service.device.models.families import Family
from engine_service.device.models.raw_config import (
    RawConfig,
    decode,
    invalid,
    require,
    switched,
    unsupported,
)
from engine_service.device.models.rope import Rope, max_positions, read_rope
from engine_service.device.models.routing import MoE, read_moe


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of a decoder."""

    architecture: str = "LlamaForCausalLM"
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    """Of a dense layer."""
    vocab_size: int
    tied: bool
    """Whether the head reads the embedding's weights."""
    norm_eps: float
    max_positions: int
    rope: Rope = Rope()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of query and key is normalised."""
    activation: str = "silu"
    norm_offset: float = 0.0
    """What is added to the weights of a norm."""
    embedding_scale: float = 1.0
    moe: MoE | None = None
    """The experts; none where every layer is dense."""

    @property
    def rotary_dim(self) -> int:
        """How many channels of each head are rotated."""
        return int(self.head_dim * self.rope.fraction)

    def is_dense(self, layer: int) -> bool:
        """Returns whether a layer has one feed-forward for all tokens."""
        return self.moe is None or layer in self.moe.dense_layers


def parse_config(text: bytes) -> ModelConfig:
    """Parses the text of a `config.json`.

    Raises `UnsupportedModel` naming the setting that this engine does not serve, and
    `ModelError` for a text that is no valid configuration.
    """
    raw, family = decode(text)
    try:
        config = _config(raw, family)
    except msgspec.MsgspecError as error:
        raise invalid(str(error)) from error
    _refuse_unsupported(raw, family, config)
    _check_heads(config, given=raw.head_dim is not None)
    return config


def _config(raw: RawConfig, family: Family) -> ModelConfig:
    rope = read_rope(raw, family)
    return ModelConfig(
        architecture=raw.architectures[0],
        hidden_size=raw.hidden_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        ffn_size=raw.intermediate_size,
        vocab_size=raw.vocab_size,
        tied=raw.tie_word_embeddings,
        norm_eps=raw.rms_norm_eps,
        max_positions=max_positions(raw, rope),
        rope=rope,
        qkv_bias=switched(raw, family.qkv_bias),
        output_bias=switched(raw, family.output_bias),
        mlp_bias=switched(raw, family.mlp_bias),
        qk_norm=switched(raw, family.qk_norm),
        activation=family.activation,
        norm_offset=family.norm_offset,
        embedding_scale=raw.hidden_size**0.5 if family.scaled_embedding else 1.0,
        moe=read_moe(raw, family),
    )


def _refuse_unsupported(raw: RawConfig, family: Family, config: ModelConfig) -> None:
    require("hidden_act", raw.hidden_act, [family.activation])
    if not family.mlp_bias:
        require("mlp_bias", raw.mlp_bias, [False])
    if "attention_bias" not in (family.qkv_bias, family.output_bias):
        require("attention_bias", raw.attention_bias, [False])
    require("use_bidirectional_attention", raw.use_bidirectional_attention, [None, False])
    if not _float8_in_blocks(raw.quantization_config or {}):
        require("quantization_config", raw.quantization_config, [None])
    require("use_sliding_window", raw.use_sliding_window, [False])
    _refuse_window(raw, family, config)


def _float8_in_blocks(found: dict[str, Any]) -> bool:
    """What else it says is found in the weights themselves."""
    return (found.get("quant_method"), found.get("weight_block_size")) == ("fp8", [BLOCK, BLOCK])


def _refuse_window(raw: RawConfig, family: Family, config: ModelConfig) -> None:
    """A window that no context exceeds changes nothing."""
    for kind in raw.layer_types or ():
        require("layer_types", kind, ["full_attention"])
    if not family.window or raw.sliding_window is None:
        return
    first = 0 if family.window == "all" else getattr(raw, family.window)
    if (first or 0) < config.layers and raw.sliding_window < config.max_positions:
        supported = f"none, or at least the {config.max_positions} positions of the model"
        raise unsupported("sliding_window", raw.sliding_window, supported)


def _check_heads(config: ModelConfig, *, given: bool) -> None:
    if config.heads % config.kv_heads:
        raise invalid(
            f"{config.heads} attention heads are no multiple of {config.kv_heads} key-value heads"
        )
    if not given and config.hidden_size % config.heads:
        raise invalid(f"hidden_size {config.hidden_size} is no multiple of {config.heads} heads")
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise invalid(
            f"{config.rotary_dim} channels of head_dim {config.head_dim} are rotated: odd, or none"
        )
