"""Core records → protocol buffers of an answer."""

from __future__ import annotations

from collections.abc import Iterable

from engine_service.core.answers import Ending, Piece
from engine_service.core.request import Finish
from engine_service.core.step_messages import TokenLogprobs
from engine_service.core.versions import Span
from seedrelay.v1 import engine_pb2

FINISH = {
    Finish.STOP: engine_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: engine_pb2.FINISH_REASON_LENGTH,
    Finish.ABORT: engine_pb2.FINISH_REASON_ABORT,
    Finish.ERROR: engine_pb2.FINISH_REASON_ERROR,
}


def piece_to_proto(piece: Piece) -> engine_pb2.GenerateResponse:
    """Returns the message of a piece of an answer."""
    response = engine_pb2.GenerateResponse(
        index=piece.index, token_ids=piece.tokens, text=piece.text,
        weight_version=piece.weights.version, epoch=piece.weights.epoch,
        degraded=piece.degraded,
    )  # fmt: skip
    if piece.logprobs:
        response.logprobs.extend(map(_position_to_proto, piece.logprobs))
    if piece.prompt_logprobs:
        response.prompt_logprobs.extend(map(_position_to_proto, piece.prompt_logprobs))
    if piece.ending is not None:
        _end(response, piece.ending)
        response.usage.cached_tokens = piece.reused_tokens
    return response


def _end(response: engine_pb2.GenerateResponse, ending: Ending) -> None:
    response.finish_reason = FINISH[ending.finish]
    response.degraded = ending.degraded
    response.usage.prompt_tokens = ending.prompt_tokens
    response.usage.completion_tokens = ending.completion_tokens
    response.version_spans.extend(_spans_to_proto(ending.spans))
    if isinstance(ending.stop, str):
        response.stop_text = ending.stop
    elif ending.stop is not None:
        response.stop_token_id = ending.stop


def _spans_to_proto(spans: Iterable[Span]) -> list[engine_pb2.VersionSpan]:
    return [
        engine_pb2.VersionSpan(
            weight_version=s.weights.version, epoch=s.weights.epoch, start=s.start, end=s.end
        )
        for s in spans
    ]


def _position_to_proto(position: TokenLogprobs) -> engine_pb2.PositionLogprobs:
    return engine_pb2.PositionLogprobs(
        token=engine_pb2.TokenLogprob(token_id=position.token, logprob=position.logprob),
        top=[engine_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in position.top],
    )
