"""Chooses tokens from logits. A draw depends on its own row, seed and index alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.core.step_messages import Row, Sampling
from engine_service.device.logits import adjust, adjusts
from engine_service.errors import NonFiniteLogits

# Wide enough for almost every nucleus; a wider one costs a full sort.
_SHORTLIST = 1024
_CHUNK, _LEAST_CHUNK = 256, 16


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Chooses one token per row.

    Args:
        logits: float32 `[rows, vocab_size]`.
        rows: How, one per row; `output_index` and the seed decide a draw.

    Raises:
        NonFiniteLogits: A row holds NaN or an infinity.
    """
    tokens = _best(logits)
    for index, row in enumerate(rows):
        if row.sampling.temperature <= 0 and not adjusts(row):
            continue
        adjusted = adjust(logits[index], row)
        if row.sampling.temperature > 0:
            chance = uniform(row.sampling.seed, row.output_index)
            tokens[index] = _draw(adjusted, row.sampling, chance)
        else:
            tokens[index] = int(adjusted.argmax())
    return tokens


def uniform(seed: int, index: int) -> float:
    """Returns a number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _best(logits: Tensor) -> list[int]:
    """Returns the likeliest token of each row. Raises `NonFiniteLogits`.

    The extremes of chunks are found with vector instructions, which a search for an index
    over the whole row is not: it takes place in one chunk.
    """
    size = logits.shape[1]
    chunk = math.gcd(size, _CHUNK)
    if chunk < _LEAST_CHUNK:
        chunk = size
    chunks = logits.view(len(logits), -1, chunk)
    highest = chunks.amax(2)
    _check_finite(chunks.amin(2).amin(1), highest.amax(1))
    best = highest.argmax(1)
    within = chunks[torch.arange(len(logits), device=logits.device), best].argmax(1)
    tokens: list[int] = (best * chunk + within).tolist()
    return tokens


def _check_finite(low: Tensor, high: Tensor) -> None:
    """Takes the extremes of each row; they are NaN where the row has one."""
    broken = (~(low.isfinite() & high.isfinite())).nonzero().flatten().tolist()
    if broken:
        raise NonFiniteLogits(
            f"logits of {len(broken)} of {len(low)} rows are not finite",
            rows=", ".join(map(str, broken)),
        )


def _draw(logits: Tensor, sampling: Sampling, chance: float) -> int:
    """Draws by inverting the cumulative distribution, likeliest token first where it cuts."""
    weights = ((logits.double() - logits.max()) / sampling.temperature).exp()
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return _invert(weights, chance)
    kept, tokens = _likeliest(weights, sampling)
    return int(tokens[_invert(kept, chance)])


def _likeliest(weights: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns weights and ids of the tokens that top-k, top-p and min-p all allow.

    top-p (arxiv.org/abs/1904.09751) counts the mass that top-k left; min-p
    (arxiv.org/abs/2407.01082) is relative to the likeliest token, whose weight is 1.
    """
    size = len(weights)
    most = min(sampling.top_k, size) if sampling.top_k > 0 else size
    values, tokens = weights.topk(min(most, _SHORTLIST))
    mass = weights.sum()
    if most < size:
        values, tokens = (values, tokens) if most <= _SHORTLIST else weights.topk(most)
        mass = values.sum()
    elif values.sum() < sampling.top_p * mass and values[-1] >= sampling.min_p:
        values, tokens = weights.sort(descending=True, stable=True)
    before = values.cumsum(0) - values
    allowed = (before < sampling.top_p * mass) & (values >= sampling.min_p)
    count = max(int(allowed.sum()), 1)
    return values[:count], tokens[:count]


def _invert(weights: Tensor, chance: float) -> int:
    cumulative = weights.cumsum(0)
    found = torch.searchsorted(cumulative, chance * cumulative[-1], right=True)
    return min(int(found), int(weights.nonzero()[-1]))
