"""Records what the weights compute, and checks that other weights compute the same.

The seed runs a fixed prompt greedily, alone in its batch. A target runs the seed's tokens
the way it will serve: the prompt eagerly, each decode through its captured graph, the first
one also eagerly. It compares logits at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import msgspec
import torch
from torch import Tensor

from engine_service.core.step_messages import Row, Sampling
from engine_service.device.kv_cache import KVCache
from engine_service.device.runner import Runner
from engine_service.device.sampler import sample
from engine_service.device.tolerance import relative_difference
from engine_service.errors import ProbeMismatch

PROMPT_TOKENS = 16
STEPS = 8
_TOP = 16
_EAGER_STEPS = 2
"""A pass reads every weight: more of them would only be the same proof again."""
_Forward = Callable[[Row], Tensor]


class ProbeStep(msgspec.Struct, frozen=True, array_like=True):
    """The likeliest tokens of one step, best first."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]

    @property
    def margin(self) -> float:
        """How far the best token is ahead of the second one, in logits."""
        return self.logits[0] - self.logits[1] if len(self.logits) > 1 else 0.0


class Probe(msgspec.Struct, frozen=True):
    """A recorded probe."""

    prompt: tuple[int, ...]
    steps: tuple[ProbeStep, ...]


def record(runner: Runner, cache: KVCache, vocab_size: int) -> bytes:
    """Records the probe. Raises `NonFiniteLogits` for weights that compute none."""
    prompt = _prompt(vocab_size, cache.max_positions)
    steps: list[ProbeStep] = []
    with torch.inference_mode():
        for position, tokens in _feed(prompt, steps, cache.max_positions):
            row = Row(tokens, position, cache.scratch[0], 0, Sampling())
            logits = runner.prefill(row)
            sample(logits, [row])  # refuses what is not finite
            top = logits[0].topk(min(_TOP, vocab_size))
            steps.append(ProbeStep(tuple(top.indices.tolist()), tuple(top.values.tolist())))
    return msgspec.msgpack.encode(Probe(prompt, tuple(steps)))


def check(
    probe: bytes, runner: Runner, cache: KVCache, vocab_size: int, limit: float,
    steps: int | None = None,
) -> None:  # fmt: skip
    """Runs a recorded probe, eager and replayed, and compares; `steps` of it, or all.

    `limit` bounds the difference of logits, relative to the largest recorded one.
    Raises `ProbeMismatch` saying where, what was expected and what was found.
    """
    recorded = _decode(probe, vocab_size, cache.max_positions)
    with torch.inference_mode():
        passes = _feed(recorded.prompt, list(recorded.steps), cache.max_positions)
        for number, (position, tokens) in enumerate(islice(passes, steps)):
            row, expected = Row(tokens, position, cache.scratch[0], 0, Sampling()), recorded.steps
            if number < _EAGER_STEPS:
                _compare(expected[number], runner.prefill(row)[0], limit, f"step {number}, eager")
            if len(tokens) == 1:
                found = runner.decode([row])[0]
                _compare(expected[number], found, limit, f"step {number}, replayed")


def _feed(
    prompt: tuple[int, ...], steps: list[ProbeStep], max_positions: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields position and tokens of each pass: the prompt, then each step's best token."""
    yield 0, prompt
    for number in range(min(STEPS, max_positions - len(prompt) + 1) - 1):
        yield len(prompt) + number, (steps[number].tokens[0],)


def _compare(expected: ProbeStep, logits: Tensor, limit: float, where: str) -> None:
    wanted, found = torch.tensor(expected.logits), logits[list(expected.tokens)].cpu()
    difference = relative_difference(wanted, found)
    if not difference <= limit:
        raise ProbeMismatch(
            f"{where}: logits differ by {difference:.3g} of the largest one, at most {limit:g} "
            "is allowed",
            step=where, expected=str(expected.logits[0]), found=str(float(found[0])),
        )  # fmt: skip
    best = int(logits.argmax())
    certain = expected.margin > 2 * limit * float(wanted.abs().max())
    if certain and best != expected.tokens[0]:
        raise ProbeMismatch(
            f"{where}: token {best} instead of {expected.tokens[0]}",
            step=where, expected=str(expected.tokens[0]), found=str(best),
        )  # fmt: skip


def _prompt(vocab_size: int, max_positions: int) -> tuple[int, ...]:
    count = min(PROMPT_TOKENS, max_positions)
    return tuple((17 + 7919 * index) % vocab_size for index in range(count))


def _decode(probe: bytes, vocab_size: int, max_positions: int) -> Probe:
    """Decodes a probe that came from elsewhere and checks that it can be run here."""
    try:
        found = msgspec.msgpack.decode(probe, type=Probe)
    except msgspec.MsgspecError as error:
        raise ProbeMismatch(f"the recorded probe cannot be read: {error}") from error
    steps = min(STEPS, max_positions - len(found.prompt) + 1)
    ids = [*found.prompt, *(token for step in found.steps for token in step.tokens)]
    if (
        found.prompt != _prompt(vocab_size, max_positions)
        or len(found.steps) != steps
        or not all(0 <= token < vocab_size for token in ids)
        or not all(step.tokens and len(step.tokens) == len(step.logits) for step in found.steps)
    ):
        raise ProbeMismatch("the recorded probe was not made for this model")
    return found
