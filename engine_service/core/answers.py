"""Token events → pieces of answers: text, stops, spans, counts. Plain Python."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from engine_service.core.detokenizer import Detokenizer
from engine_service.core.engine import Engine
from engine_service.core.request import Finish, GenerationRequest, Sequence, TokenEvent
from engine_service.core.step_messages import TokenLogprobs
from engine_service.core.stops import StopFinder
from engine_service.core.versions import Span, Spans
from relay_service.core.instance import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended."""

    finish: Finish
    stop: str | int | None
    """The text or the token that ended it, where one did."""
    prompt_tokens: int
    completion_tokens: int
    spans: list[Span]
    degraded: bool = False
    """Whether any of its tokens is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came of one answer; the last one says how it ended."""

    index: int
    """Which of the answers to the request it belongs to."""
    weights: Weights
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, where they are wanted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reused_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    ending: Ending | None = None
    degraded: bool = False
    """Whether its tokens were made while experts were lost, by others in their place."""

    def joined(self, later: Piece) -> Piece:
        """Returns this piece and the next one of the same answer as one."""
        return Piece(
            index=self.index, weights=later.weights, tokens=self.tokens + later.tokens,
            text=self.text + later.text, logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            reused_tokens=later.reused_tokens, ending=later.ending, degraded=later.degraded,
        )  # fmt: skip


async def answer(
    engine: Engine,
    request: GenerationRequest,
    sequences: list[Sequence],
    detokenizer: Callable[[], Detokenizer],
) -> AsyncGenerator[Piece]:
    """Streams the pieces of all answers to a request that was submitted, until each has ended.

    Leaving the iterator frees their KV and their slots; whoever submitted them ends them
    where it was never begun. Raises what ended the engine.
    """
    makers = [_Answer(request, one.index, detokenizer()) for one in sequences]
    running = len(sequences)
    try:
        while running:
            event = await sequences[0].events.get()
            if isinstance(event, Exception):
                for maker in makers:
                    if not maker.has_ended:
                        yield maker.broken(engine.weights)
                raise event
            maker = makers[event.index]
            if maker.has_ended:
                continue  # made in the step during which its stop text was found
            piece = maker.take(event)
            if piece.ending:
                running -= 1
                engine.end(sequences[event.index], piece.ending.finish)
            yield piece
    finally:
        for sequence in sequences:
            engine.end(sequence, Finish.ABORT)


async def gathered(pieces: AsyncGenerator[Piece], interval: int) -> AsyncGenerator[Piece]:
    """Joins pieces until they have `interval` tokens: fewer messages, each of them later.

    The first piece of an answer is not held back, nor the last one, and none holds tokens
    of two weights, or some that are degraded and some that aren't.
    """
    begun: set[int] = set()
    held: dict[int, Piece] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            before = held.pop(piece.index, None)
            if before and (before.weights, before.degraded) != (piece.weights, piece.degraded):
                yield before
                before = None
            joined = before.joined(piece) if before else piece
            if piece.index in begun and not piece.ending and len(joined.tokens) < interval:
                held[piece.index] = joined
                continue
            begun.add(piece.index)
            yield joined


class _Answer:
    """Makes the pieces of one answer."""

    def __init__(self, request: GenerationRequest, index: int, detokenizer: Detokenizer) -> None:
        self._request = request
        self._index = index
        self._detokenizer = detokenizer
        self._stops = StopFinder(request.stop_texts, shows_stop=request.shows_stop)
        self._spans = Spans()
        self._reused = 0
        self._degraded = False
        self.has_ended = False

    def take(self, event: TokenEvent) -> Piece:
        """Returns the piece of one event; an end token has an id and no text."""
        text, finish = "", event.finish
        stop: str | int | None = None
        if event.token is not None:
            self._spans.add(event.weights)
            self._reused = event.reused
            self._degraded |= event.degraded
            if event.token in self._request.stop_ids and finish is Finish.STOP:
                stop = event.token
            else:
                text = self._push(self._detokenizer.push(event.token))
        if finish and not self._stops.found:
            text += self._push(self._detokenizer.flush())
        if self._stops.found:
            finish, stop = Finish.STOP, self._stops.found
        elif finish:
            text += self._stops.flush()
        self.has_ended = finish is not None
        return Piece(
            index=self._index, weights=event.weights,
            tokens=[] if event.token is None else [event.token], text=text,
            logprobs=(event.logprobs,) if event.logprobs else (),
            prompt_logprobs=event.prompt_logprobs,
            reused_tokens=self._reused, ending=self._ending(finish, stop) if finish else None,
            degraded=event.degraded,
        )  # fmt: skip

    def broken(self, weights: Weights) -> Piece:
        """Returns the last piece of an answer that an error ends."""
        return self.take(TokenEvent(None, weights, Finish.ERROR, index=self._index))

    def _push(self, piece: str) -> str:
        """No stop text ends an answer before its fewest tokens are there."""
        if self._spans.tokens < self._request.min_tokens:
            return piece
        return self._stops.push(piece)

    def _ending(self, finish: Finish, stop: str | int | None) -> Ending:
        return Ending(
            finish=finish, stop=stop, prompt_tokens=len(self._request.prompt),
            completion_tokens=self._spans.tokens, spans=self._spans.spans,
            degraded=self._degraded,
        )  # fmt: skip
