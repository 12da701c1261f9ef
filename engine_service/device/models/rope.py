"""Reads how positions are rotated (arxiv.org/abs/2104.09864) and how that is stretched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from engine_service.device.models.families import Family
from engine_service.device.models.raw_config import (
    MAX_SIZE,
    RawConfig,
    Size,
    invalid,
    require,
    unsupported,
)

THETA = 10000.0
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
_LLAMA3 = {"low_freq_factor", "high_freq_factor"}
_STRETCHED = {"factor", "original_max_position_embeddings"}
KINDS: Mapping[str, set[str]] = {
    "default": _COMMON,
    "linear": _COMMON | {"factor"},
    "llama3": _COMMON | _STRETCHED | _LLAMA3,
    "yarn": _COMMON | _STRETCHED | _YARN,
}
"""Which settings belong to each kind; another one would be a variant that isn't known."""
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the rotary tables. What a kind does not use keeps its default."""

    kind: str = "default"
    theta: float = THETA
    fraction: float = 1.0
    """Which part of each head is rotated."""
    factor: float = 1.0
    """How much longer contexts may be than those of training."""
    original_positions: int = 0
    """Context of training."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncated: bool = True
    """Whether the channels at which stretching begins and ends are rounded."""
    attention_factor: float = 1.0
    """What cosines and sines are multiplied by."""


class _Settings(msgspec.Struct, kw_only=True):
    rope_type: str = ""
    type: str = "default"
    rope_theta: _Positive | None = None
    partial_rotary_factor: _Positive | None = None
    factor: Annotated[float, msgspec.Meta(ge=1)] | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    attention_factor: _Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(raw: RawConfig, family: Family) -> Rope:
    """Reads `rope_parameters`, or `rope_scaling` as it was called before.

    Raises `UnsupportedModel` for another kind or setting, `ModelError` for what cannot be.
    """
    found = _settings(raw)
    kind = found.rope_type or found.type
    fraction = found.partial_rotary_factor or raw.partial_rotary_factor
    if not family.partial_rotary:
        require("partial_rotary_factor", fraction, [1.0])
    rope = Rope(kind=kind, theta=_theta(raw, found), fraction=fraction)
    if kind == "default":
        return rope
    if found.factor is None and (kind != "yarn" or not found.original_max_position_embeddings):
        raise invalid(f"rope factor is missing, {kind} needs it")
    original = found.original_max_position_embeddings or raw.max_position_embeddings
    factor = found.factor or max(1.0, raw.max_position_embeddings / original)
    if kind == "linear":
        return msgspec.structs.replace(rope, factor=factor)
    read = _yarn(found, factor) if kind == "yarn" else _llama3(found)
    return msgspec.structs.replace(rope, factor=factor, original_positions=original, **read)


def max_positions(raw: RawConfig, rope: Rope) -> int:
    """Returns how many positions a model has.

    Configurations of YaRN keep the context of training, so the longer one counts there.
    """
    stretched = int(rope.original_positions * rope.factor) if rope.kind == "yarn" else 0
    if stretched > MAX_SIZE:
        raise invalid(f"rope factor {rope.factor} stretches to {stretched} positions")
    return max(raw.max_position_embeddings, stretched)


def _settings(raw: RawConfig) -> _Settings:
    newer, older = raw.rope_parameters, raw.rope_scaling
    if newer and older and newer != older:
        raise invalid("rope_parameters and rope_scaling differ")
    given = {name: value for name, value in (newer or older or {}).items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    require("rope_type", kind, KINDS)
    for name, value in given.items():
        if name not in KINDS[kind]:
            known = " | ".join(sorted(KINDS[kind]))
            raise unsupported(f"rope setting {name}", value, known, f"of {kind}")
    return msgspec.convert(given, _Settings)


def _theta(raw: RawConfig, found: _Settings) -> float:
    theta = found.rope_theta or raw.rope_theta or THETA
    if theta <= 1:
        raise invalid(f"rope_theta {theta!r} is not above 1")
    return theta


def _llama3(found: _Settings) -> dict[str, Any]:
    low, high = found.low_freq_factor, found.high_freq_factor
    if low is None or high is None or low >= high:
        raise invalid(f"rope low_freq_factor {low} is not below high_freq_factor {high}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(found: _Settings, factor: float) -> dict[str, Any]:
    attention = found.attention_factor
    if attention is None and found.mscale and found.mscale_all_dim:
        attention = _sharpening(factor, found.mscale) / _sharpening(factor, found.mscale_all_dim)
    return {
        "beta_fast": found.beta_fast or 32.0,
        "beta_slow": found.beta_slow or 1.0,
        "truncated": found.truncate,
        "attention_factor": attention or _sharpening(factor, 1.0),
    }


def _sharpening(factor: float, scale: float) -> float:
    """By how much longer contexts need sharper attention (arxiv.org/abs/2309.00071, 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0
