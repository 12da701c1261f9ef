"""The part of a `config.json` that is read, by the names that it uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from engine_service.device.models.families import FAMILIES, REFUSED, Family, Switch
from engine_service.errors import ModelError, UnsupportedModel

MAX_SIZE = 1 << 24
Size = Annotated[int, msgspec.Meta(gt=0, le=MAX_SIZE)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class RawConfig(msgspec.Struct, kw_only=True):
    """All settings that any family reads, and those that none obeys."""

    architectures: list[str] = []
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    tie_word_embeddings: bool = False
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)]
    hidden_act: str = "silu"
    quantization_config: dict[str, Any] | None = None

    max_position_embeddings: Size
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0

    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    use_sliding_window: bool = False
    use_bidirectional_attention: bool | None = None
    sliding_window: Count | None = None
    max_window_layers: Count | None = None
    layer_types: list[str] | None = None

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Count | None = None
    n_shared_experts: Count | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float | None = None
    scoring_func: str | None = None
    topk_method: str | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    first_k_dense_replace: Count | None = None
    moe_layer_freq: Size | None = None
    decoder_sparse_step: Size | None = None
    mlp_only_layers: list[Count] | None = None


def decode(raw: bytes) -> tuple[RawConfig, Family]:
    """Returns the settings of a `config.json`, with its family's defaults, and that family.

    Raises `ModelError` for a text that is no configuration, and `UnsupportedModel`.
    """
    try:
        settings = msgspec.json.decode(raw, type=dict[str, Any])
        architecture = ", ".join(msgspec.convert(settings.get("architectures", []), list[str]))
        family = _family(architecture)
        return msgspec.convert({**family.defaults, **settings}, RawConfig), family
    except msgspec.MsgspecError as error:
        raise invalid(str(error)) from error


def switched(raw: RawConfig, value: Switch) -> bool:
    """Returns what a family fixes, or else the setting that it names."""
    return bool(getattr(raw, value)) if isinstance(value, str) else value


def require(field: str, found: object, supported: Iterable[object]) -> None:
    """Raises `UnsupportedModel` for a setting that is none of `supported`."""
    if found not in (values := list(supported)):
        raise unsupported(field, found, " | ".join(map(str, values)))


def unsupported(field: str, found: object, supported: str, why: str = "") -> UnsupportedModel:
    """Makes the error for a setting that this engine would compute wrongly."""
    because = f" ({why})" if why else ""
    return UnsupportedModel(
        f"{field} {found!r} is not supported{because}, only {supported}",
        field=field, expected=supported, found=str(found),
    )  # fmt: skip


def invalid(words: str) -> ModelError:
    """Makes the error for a configuration that contradicts itself."""
    return ModelError(f"config.json: {words}", file="config.json")


def _family(architecture: str) -> Family:
    if architecture not in FAMILIES:
        missing = REFUSED.get(architecture, "")
        raise unsupported("architectures", architecture, " | ".join(FAMILIES), missing)
    return FAMILIES[architecture]
