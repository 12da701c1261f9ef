"""Which weights made which tokens of an answer. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from relay_service.core.instance import Weights


@dataclass(slots=True)
class Span:
    """Tokens from `start` to before `end` that the same weights made."""

    weights: Weights
    start: int
    end: int


class Spans:
    """Spans of one answer, as its tokens come."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, weights: Weights) -> None:
        """Books the next token."""
        if self.spans and self.spans[-1].weights == weights:
            self.spans[-1].end += 1
        else:
            start = self.tokens
            self.spans.append(Span(weights, start, start + 1))

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self.spans[-1].end if self.spans else 0
