"""Computes the rotary tables: cosines and sines by position, stretched or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine_service.device.models.rope import Rope


def rotary_tables(rope: Rope, dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotary angles (arxiv.org/abs/2104.09864).

    Both are float32 `[positions, dim / 2]`, for `dim` rotated channels of each head.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    speeds = _STRETCHES[rope.kind](1.0 / rope.theta**exponents, rope)
    angles = torch.outer(torch.arange(positions).float(), speeds)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def _linear(speeds: Tensor, rope: Rope) -> Tensor:
    """Squeezes all positions into those of training (arxiv.org/abs/2306.15595)."""
    return speeds / rope.factor


def _llama3(speeds: Tensor, rope: Rope) -> Tensor:
    """Slows down channels by how often they turn within the context of training.

    Below `low_freq_factor` turns by the whole factor, above `high_freq_factor` not at all.
    Source: arxiv.org/abs/2407.21783, and the configuration of Llama 3.1.
    """
    turns = rope.original_positions * speeds / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return _blend(speeds, kept, rope.factor)


def _yarn(speeds: Tensor, rope: Rope) -> Tensor:
    """Slows down by channel: from one that turns `beta_fast` times to one of `beta_slow`.

    Source: arxiv.org/abs/2309.00071, section 3.2.
    """
    dim = 2 * len(speeds)
    first, last = _channel(rope.beta_fast, dim, rope), _channel(rope.beta_slow, dim, rope)
    if rope.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # Where both are one channel, the step between it and the next is steep, not undefined.
    slowed = (torch.arange(dim // 2).float() - first) / ((last - first) or 1e-3)
    return _blend(speeds, 1 - slowed.clamp(0, 1), rope.factor)


def _channel(turns: float, dim: int, rope: Rope) -> float:
    """Returns which pair of channels turns so often within the context of training."""
    speed = 2 * math.pi * turns / rope.original_positions
    return -dim * math.log(speed) / (2 * math.log(rope.theta))


def _blend(speeds: Tensor, kept: Tensor, factor: float) -> Tensor:
    return speeds * kept + speeds / factor * (1 - kept)


_STRETCHES: Mapping[str, Callable[[Tensor, Rope], Tensor]] = {
    "default": lambda speeds, _rope: speeds,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
