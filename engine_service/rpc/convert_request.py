"""Protocol buffers ↔ core records of a request: what is asked, checked by field, and answered."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

from engine_service.core.messages import Sampling
from engine_service.core.request import Finish, GenerationRequest
from engine_service.core.tokenizer import TextCodec
from engine_service.core.versions import Span
from engine_service.errors import InvalidRequest
from seedrelay.v1 import engine_pb2

DEFAULT_MAX_TOKENS = 128
MAX_TOKENS = 1 << 20
MAX_TEMPERATURE = 100.0

FINISH = {
    Finish.STOP: engine_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: engine_pb2.FINISH_REASON_LENGTH,
    Finish.ABORT: engine_pb2.FINISH_REASON_ABORT,
}


def request_from_proto(message: engine_pb2.GenerateRequest, codec: TextCodec) -> GenerationRequest:
    """Returns a checked and tokenized request. Raises `InvalidRequest` by field."""
    params = message.sampling
    max_tokens = params.max_tokens or DEFAULT_MAX_TOKENS
    _in_range("sampling.max_tokens", max_tokens, 1, MAX_TOKENS)
    stop_ids = frozenset(_checked_ids("sampling.stop_token_ids", params.stop_token_ids, codec))
    return GenerationRequest(
        prompt=_prompt(message, codec),
        sampling=_sampling(params),
        max_tokens=max_tokens,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | codec.end_ids,
    )


def usage_to_proto(request: GenerationRequest, completion: int) -> engine_pb2.Usage:
    """Returns the token counts of an answer."""
    return engine_pb2.Usage(prompt_tokens=len(request.prompt), completion_tokens=completion)


def spans_to_proto(spans: Iterable[Span]) -> list[engine_pb2.VersionSpan]:
    """Returns the versions of an answer."""
    return [
        engine_pb2.VersionSpan(
            weight_version=s.weights.version, epoch=s.weights.epoch, start=s.start, end=s.end
        )
        for s in spans
    ]


def _prompt(message: engine_pb2.GenerateRequest, codec: TextCodec) -> tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            return codec.encode(message.text)
        case "tokens":
            return tuple(_checked_ids("tokens.token_ids", message.tokens.token_ids, codec))
        case "chat":
            messages = [{"role": m.role, "content": m.content} for m in message.chat.messages]
            if not messages:
                raise InvalidRequest("a chat needs a message", field="chat.messages")
            return codec.encode_chat(messages)
        case _:
            raise InvalidRequest("text, chat or tokens is needed", field="prompt")


def _sampling(params: engine_pb2.SamplingParams) -> Sampling:
    _in_range("sampling.temperature", params.temperature, 0, MAX_TEMPERATURE)
    _in_range("sampling.top_k", params.top_k, 0, 1 << 30)
    _in_range("sampling.top_p", params.top_p, 0, 1)
    _in_range("sampling.min_p", params.min_p, 0, 1)
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
    )


def _checked_ids(field: str, ids: Iterable[int], codec: TextCodec) -> list[int]:
    checked = list(ids)
    for token in checked:
        _in_range(field, token, 0, codec.vocab_size - 1)
    return checked


def _in_range(field: str, value: float, least: float, most: float) -> None:
    if math.isnan(value) or not least <= value <= most:
        raise InvalidRequest(
            f"{field} is {value:g}, it must be from {least:g} to {most:g}",
            field=field, expected=f"{least:g}..{most:g}", found=f"{value:g}",
        )  # fmt: skip
