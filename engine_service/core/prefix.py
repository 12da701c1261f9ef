"""Prefix cache: KV of equal beginnings is computed once. Plain Python.

KV is found by its tokens and by what computed it, so KV of other weights cannot
match, whether or not anybody thought of flushing.
"""

from __future__ import annotations

import msgspec

from engine_service.core.blocks import BlockPool, extend_keys
from engine_service.core.request import Sequence
from relay_service.core.instance import Weights


def reuse(pool: BlockPool, sequence: Sequence, weights: Weights) -> None:
    """Gives a sequence that holds no blocks those of its prefix that are there already.

    One that wants log-probabilities of its prompt gets none: its prompt must be computed.
    """
    sequence.keys.clear()
    if sequence.request.sampling.prompt_logprobs is not None:
        sequence.origin = ""
        return
    sequence.origin = _origin(weights)
    tokens = sequence.part(0, sequence.length)
    extend_keys(sequence.keys, sequence.origin, tokens, pool.block_tokens)
    # The last token is always computed: its logits are wanted.
    whole = (sequence.length - 1) // pool.block_tokens
    sequence.blocks += pool.find(sequence.keys[:whole])
    sequence.cached = len(sequence.blocks) * pool.block_tokens


def publish(pool: BlockPool, sequence: Sequence, weights: Weights) -> None:
    """Lets others find the blocks that a step has filled, unless weights were changed meanwhile."""
    if sequence.origin != _origin(weights):
        sequence.origin = ""
        return
    full = sequence.cached // pool.block_tokens
    if full > len(sequence.keys):
        tokens = sequence.part(0, sequence.cached)
        extend_keys(sequence.keys, sequence.origin, tokens, pool.block_tokens)
    for number in range((sequence.cached - sequence.chunk) // pool.block_tokens, full):
        pool.publish(sequence.blocks[number], sequence.keys[number])


def _origin(weights: Weights) -> str:
    return weights.kv_origin or kv_origin(weights)


def apart(weights: Weights, phase: int) -> Weights:
    """Returns the same weights, whose KV none but the same phase of lost experts ever finds."""
    return msgspec.structs.replace(weights, kv_origin=f"{_origin(weights)}/degraded {phase}")


def kv_origin(weights: Weights) -> str:
    """Names what computes KV, for weights that only lie elsewhere later to say the same."""
    return f"{weights.epoch}/{weights.digest}"
