"""Reads a `config.json` into what decides layout and meaning of a decoder's weights."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from engine_service.device.formats.layouts import BLOCK
from engine_service.errors import ModelError, UnsupportedModel

ARCHITECTURE = "LlamaForCausalLM"
_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 24)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of a decoder of the Llama family."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    """Whether the head reads the embedding's weights."""
    norm_eps: float
    rope_theta: float
    max_positions: int


class _RawConfig(msgspec.Struct, kw_only=True):
    """The part of a `config.json` that we read, by the names that it uses."""

    architectures: list[str] = []
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size
    vocab_size: _Size
    tie_word_embeddings: bool = False
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)]
    max_position_embeddings: _Size
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    partial_rotary_factor: float = 1.0
    quantization_config: dict[str, Any] | None = None


def parse_config(raw: bytes) -> ModelConfig:
    """Parses the text of a `config.json`.

    Raises `UnsupportedModel` naming the setting that this engine does not serve, and
    `ModelError` for a text that is no valid configuration.
    """
    try:
        found = msgspec.json.decode(raw, type=_RawConfig)
    except msgspec.MsgspecError as error:
        raise ModelError(f"config.json: {error}", file="config.json") from error
    _refuse_unsupported(found)
    kv_heads = found.num_key_value_heads or found.num_attention_heads
    config = ModelConfig(
        hidden_size=found.hidden_size,
        layers=found.num_hidden_layers,
        heads=found.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=found.head_dim or found.hidden_size // found.num_attention_heads,
        ffn_size=found.intermediate_size,
        vocab_size=found.vocab_size,
        tied=found.tie_word_embeddings,
        norm_eps=found.rms_norm_eps,
        rope_theta=_rope_theta(found),
        max_positions=found.max_position_embeddings,
    )
    _check_heads(config, given=found.head_dim is not None)
    return config


def _refuse_unsupported(found: _RawConfig) -> None:
    rope = found.rope_parameters or found.rope_scaling or {}
    for field, value, supported in (
        ("architectures", ", ".join(found.architectures), ARCHITECTURE),
        ("hidden_act", found.hidden_act, "silu"),
        ("attention_bias", found.attention_bias, False),
        ("mlp_bias", found.mlp_bias, False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
        ("partial_rotary_factor", found.partial_rotary_factor, 1.0),
        ("quantization_config", _other_quantisation(found), None),
    ):
        if value != supported:
            raise UnsupportedModel(
                f"{field} {value!r} is not supported, only {supported!r}",
                field=field, expected=str(supported), found=str(value),
            )  # fmt: skip


def _other_quantisation(found: _RawConfig) -> dict[str, Any] | None:
    """Returns a quantisation that isn't float8 in blocks; what it says is found in the weights."""
    given = found.quantization_config or {}
    blocks = (given.get("quant_method"), given.get("weight_block_size")) == ("fp8", [BLOCK, BLOCK])
    return None if blocks else found.quantization_config


def _rope_theta(found: _RawConfig) -> float:
    theta = (found.rope_parameters or {}).get("rope_theta", found.rope_theta or 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"config.json: rope_theta {theta!r} is not a positive number")
    return float(theta)


def _check_heads(config: ModelConfig, *, given: bool) -> None:
    if config.heads % config.kv_heads:
        raise ModelError(
            f"config.json: {config.heads} attention heads are no multiple of "
            f"{config.kv_heads} key-value heads"
        )
    if not given and config.hidden_size % config.heads:
        raise ModelError(
            f"config.json: hidden_size {config.hidden_size} is no multiple of {config.heads} heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"config.json: head_dim {config.head_dim} is odd, rotation needs pairs")
