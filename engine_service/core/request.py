"""A request on its way: what was asked, what has been made, how it ended. Plain Python."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from enum import StrEnum

from engine_service.core.messages import Sampling
from relay_service.core.instance import Weights

_ids = itertools.count(1)


class Finish(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a caller asked for, checked and tokenized."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end generation, the model's own included unless it ignores them."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token, or the end. The last event of a stream carries `finish`."""

    token: int | None
    weights: Weights
    """Weights that made the token."""
    finish: Finish | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the scheduler."""

    request: GenerationRequest
    number: int = field(default_factory=lambda: next(_ids))
    """Order of arrival."""
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """KV blocks that it holds."""
    cached: int = 0
    """Positions whose KV is in the cache."""
    finish: Finish | None = None
    events: asyncio.Queue[TokenEvent | Exception] = field(default_factory=asyncio.Queue)
    """An exception ends the stream with an error."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def pending(self) -> tuple[int, ...]:
        """Tokens whose KV is not in the cache: the whole prompt, or the last token."""
        return (*self.request.prompt, *self.output)[self.cached :]
