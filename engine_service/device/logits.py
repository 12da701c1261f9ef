"""What a request wants done to its logits before a token is chosen, and told about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.core.step_messages import Row, Sampling, TokenLogprobs

_OUT = float("-inf")
_BITS = torch.arange(8, dtype=torch.uint8)


def adjusts(row: Row) -> bool:
    """Whether a row's token is chosen from other logits than the model's."""
    return bool(row.sampling.looks_back or row.sampling.logit_bias or row.banned or row.allowed)


def adjust(logits: Tensor, row: Row) -> Tensor:
    """Returns the logits (float32 `[vocab_size]`) that a row's token is chosen from.

    Penalties as in CTRL (arxiv.org/abs/1909.05858) for repetition, and as in OpenAI's API
    for presence and frequency; then biases; then what may not come.
    """
    sampling = row.sampling
    logits = logits.clone()
    if sampling.looks_back:
        _penalize(logits, row)
    if sampling.logit_bias:
        tokens = _on(logits, list(sampling.logit_bias))
        logits[tokens] += _on(logits, list(sampling.logit_bias.values()))
    if row.allowed:
        logits[~_unpacked(row.allowed, logits)] = _OUT
    if row.banned:
        # A structure that is complete allows the end alone; then it comes, however early.
        banned = logits.index_fill(0, _on(logits, row.banned), _OUT)
        logits = banned if banned.max() > _OUT else logits
    return logits


def logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Returns the log-probabilities of a token and of the `count` likeliest ones."""
    scores = torch.log_softmax(logits.double(), 0)
    top = scores.topk(min(count, len(scores)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(token, float(scores[token]), tuple(pairs))


def _penalize(logits: Tensor, row: Row) -> None:
    sampling: Sampling = row.sampling
    if sampling.repetition_penalty != 1:
        seen = _on(logits, sorted({*row.prompt, *row.output}))
        values = logits[seen]
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if row.output:
        tokens, counts = torch.unique(_on(logits, row.output), return_counts=True)
        logits[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _unpacked(mask: bytes, logits: Tensor) -> Tensor:
    """Returns which tokens a mask allows, bool `[vocab_size]`."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed.unsqueeze(1) >> _BITS) & 1
    return bits.flatten()[: len(logits)].bool().to(logits.device)


def _on(logits: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, device=logits.device)
