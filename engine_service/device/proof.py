"""Runs weights that are staged, before anything is served from them.

Eagerly, with a small cache of their own. Several ranks do so in groups of their own, opened
for this and left again, so that it never comes between what their steps compute together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from engine_service.core.step_messages import Row, Sampling
from engine_service.core.update_messages import ProveStaged
from engine_service.device import parallel, probe
from engine_service.device.arena import Weights
from engine_service.device.batch import Batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.device.runner import Runner
from engine_service.device.sharding import rank_config
from engine_service.errors import ProbeMismatch

if TYPE_CHECKING:
    from engine_service.device.rank import Rank


class _Eager:
    """Captures nothing: decodes by the model itself."""

    proven = captured = True
    compiled = False

    def __init__(self, model: Llama, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    def capture(self) -> None:
        """Does nothing."""

    def replay(self, batch: Batch) -> Tensor:
        """Computes the logits of a decode batch."""
        return self._model.forward(batch, self._cache)


def prove(rank: Rank, weights: Weights, command: ProveStaged, number: int) -> bytes:
    """Runs weights; returns the probe that they have met, or recorded.

    `number` is another one each time, and the same on every rank. Raises `ProbeMismatch`,
    `NonFiniteLogits`, `InvalidRequest` for prompts that the model cannot take, and
    `CollectiveFailed` when another rank stays away.
    """
    with _running(rank, weights, command, number) as (runner, cache):
        vocabulary = rank.config.vocab_size
        recorded = command.probe or probe.record(runner, cache, vocabulary)
        if command.probe:
            probe.check(command.probe, runner, cache, vocabulary, rank.tolerance)
        for index, (prompt, expected) in enumerate(command.prompts):
            _answer(runner, cache, index, prompt, expected)
        return recorded


@contextmanager
def _running(
    rank: Rank, weights: Weights, command: ProveStaged, number: int
) -> Iterator[tuple[Runner, KVCache]]:
    own, tokens = rank_config(rank.config, rank.shard), rank.cache.block_tokens
    longest = max((len(prompt) + len(answer) for prompt, answer in command.prompts), default=0)
    blocks = -(-min(longest, own.max_positions) // tokens)
    groups = rank.meet(f"proof {number}")
    try:
        cache = KVCache(own, rank.dtype, blocks, tokens, rank.device.torch)
        model = Llama(own, weights.tensors, groups, rank.layout, rank.shard.experts)
        model.pass_over(rank.experts.passed)
        yield Runner(model, cache, _Eager(model, cache)), cache
    finally:
        parallel.leave(groups)


def _answer(
    runner: Runner, cache: KVCache, index: int, prompt: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Decodes greedily; raises `ProbeMismatch` at the first token that is another one."""
    blocks = tuple(range(cache.scratch[0][0]))
    tokens, position = prompt, 0
    for number in range(max(1, len(expected))):
        row = Row(tokens, position, blocks, number, Sampling())
        found = runner.step((row,)).tokens[0]
        if expected and found != expected[number]:
            raise ProbeMismatch(
                f"prompt {index}: token {number} of the answer is {found}, not {expected[number]}",
                step=str(number), expected=str(expected[number]), found=str(found),
            )  # fmt: skip
        position += len(tokens)
        tokens = (found,)
