"""A request on its way: what was asked, what has been made, how it ended. Plain Python."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from engine_service.core.blocks import Key
from engine_service.core.ports import Constraint
from engine_service.core.step_messages import Sampling, TokenLogprobs
from relay_service.core.instance import Weights

_ids = itertools.count(1)
_SEEDS = 1 << 64


class Finish(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a caller asked for, checked and tokenized."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    """Tokens before which no stop token may come."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end generation, the model's own included unless it ignores them."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end generation."""
    shows_stop: bool = False
    """Whether the text that ended generation is shown."""
    priority: int = 0
    """The higher runs first."""
    constraint: Constraint | None = None
    """What the answer must look like."""
    request: str = ""
    """What the caller calls it; answers of one request share it."""
    one_version: bool = False
    """Whether an answer that weights other than its first would go on with ends instead."""
    weight_version: str = ""
    """Version that must make all of it; empty for any."""
    refuses_degraded: bool = False
    """Whether it fails rather than be answered while experts are lost."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token, or the end. The last event of a stream carries `finish`."""

    token: int | None
    weights: Weights
    """Weights that made the token."""
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of every prompt token but the first; with the first token of an answer only."""
    index: int = 0
    """Which of the answers to one request it belongs to."""
    reused: int = 0
    """Prompt tokens whose KV another request had computed."""
    degraded: bool = False
    """Whether experts were lost when the token was made, and others served in their place."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the scheduler."""

    request: GenerationRequest
    index: int = 0
    """Which of the answers to one request it is."""
    events: asyncio.Queue[TokenEvent | Exception] = field(default_factory=asyncio.Queue)
    """Answers to one request share it. An exception ends them all."""
    number: int = field(default_factory=lambda: next(_ids))
    """Order of arrival."""
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """KV blocks that it holds."""
    cached: int = 0
    """Positions whose KV is in the cache."""
    chunk: int = 0
    """Tokens that the step in work computes."""
    reused: int = 0
    """Prompt tokens whose KV another request had computed."""
    origin: str = ""
    """What computes its KV; empty for KV that nobody else may use."""
    keys: list[Key] = field(default_factory=list)
    """Keys of its full blocks, as far as they are known."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    leader: Sequence | None = None
    """Answer to the same prompt, whose KV it waits for."""
    begun: bool = False
    """Whether it has ever run; it may be in the queue again."""
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Number of tokens whose KV is not in the cache: a whole prompt, or the last token."""
        return self.length - self.cached

    def part(self, begin: int, end: int) -> tuple[int, ...]:
        """Returns the tokens of prompt and answer from `begin` to before `end`."""
        prompt = self.request.prompt
        first, last = (max(0, at - len(prompt)) for at in (begin, end))
        return (*prompt[begin:end], *self.output[first:last])

    def ends_with(self, token: int, max_tokens: int) -> Finish | None:
        """Returns how a token that was just made ends it, if it does; follows its structure.

        `max_tokens` bound prompt and answer together. Raises `EngineError` for a token that
        the structure does not allow.
        """
        request = self.request
        complete = request.constraint is not None and request.constraint.accept(token)
        if complete or token in request.stop_ids:
            return Finish.STOP
        if len(self.output) >= request.max_tokens or self.length >= max_tokens:
            return Finish.LENGTH
        return None


def answers_to(request: GenerationRequest, count: int) -> list[Sequence]:
    """Makes the sequences of several answers to one request.

    The first computes the KV of the prompt for all. Each draws with a seed of its own.
    """
    first = Sequence(request)
    others = []
    for index in range(1, count):
        seed = (request.sampling.seed + index) % _SEEDS
        sampling = msgspec.structs.replace(request.sampling, seed=seed, prompt_logprobs=None)
        constraint = request.constraint.fresh() if request.constraint else None
        own = dataclasses.replace(request, sampling=sampling, constraint=constraint)
        others.append(Sequence(own, index, first.events, leader=first))
    return [first, *others]
