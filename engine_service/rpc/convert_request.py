"""Protocol buffers → core records of a request: what is asked, checked by field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence

from engine_service.core.messages import Sampling
from engine_service.core.ports import Constraint
from engine_service.core.request import GenerationRequest
from engine_service.core.tokenizer import TextCodec
from engine_service.errors import InvalidRequest
from seedrelay.v1 import engine_pb2

DEFAULT_MAX_TOKENS = 128
MAX_TOKENS = 1 << 20
MAX_TEMPERATURE = 100.0
MAX_ANSWERS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 16


def request_from_proto(message: engine_pb2.GenerateRequest, codec: TextCodec) -> GenerationRequest:
    """Returns a checked and tokenized request. Raises `InvalidRequest` by field."""
    params = message.sampling
    max_tokens = params.max_tokens or DEFAULT_MAX_TOKENS
    _in_range("sampling.max_tokens", max_tokens, 1, MAX_TOKENS)
    stop_ids = frozenset(_checked_ids("sampling.stop_token_ids", params.stop_token_ids, codec))
    _in_range("sampling.min_tokens", params.min_tokens, 0, max_tokens)
    return GenerationRequest(
        prompt=_prompt(message, codec),
        sampling=_sampling(params, codec),
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | codec.end_ids,
        stop_texts=_stop_texts(params.stop),
        shows_stop=params.include_stop,
        priority=message.priority,
        constraint=_constraint(params.structure, codec),
        request=message.request,
    )


def answers_from_proto(message: engine_pb2.GenerateRequest) -> int:
    """Returns how many answers are asked for. Raises `InvalidRequest`."""
    _in_range("sampling.n", message.sampling.n, 0, MAX_ANSWERS)
    return int(message.sampling.n) or 1


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


def _sampling(params: engine_pb2.SamplingParams, codec: TextCodec) -> Sampling:
    _in_range("sampling.temperature", params.temperature, 0, MAX_TEMPERATURE)
    _in_range("sampling.top_k", params.top_k, 0, 1 << 30)
    _in_range("sampling.top_p", params.top_p, 0, 1)
    _in_range("sampling.min_p", params.min_p, 0, 1)
    _in_range("sampling.presence_penalty", params.presence_penalty, -2, 2)
    _in_range("sampling.frequency_penalty", params.frequency_penalty, -2, 2)
    _in_range("sampling.repetition_penalty", params.repetition_penalty, 0, 100)
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=_logit_bias(params.logit_bias, codec),
        logprobs=_logprobs("logprobs", params),
        prompt_logprobs=_logprobs("prompt_logprobs", params),
    )


def _logit_bias(biases: Mapping[int, float], codec: TextCodec) -> dict[int, float]:
    _in_range("sampling.logit_bias", len(biases), 0, MAX_BIASES)
    _checked_ids("sampling.logit_bias", biases, codec)
    for bias in biases.values():
        _in_range("sampling.logit_bias", bias, -100, 100)
    return dict(biases)


def _logprobs(field: str, params: engine_pb2.SamplingParams) -> int | None:
    if not params.HasField(field):
        return None
    count = getattr(params, field)
    _in_range(f"sampling.{field}", count, 0, MAX_LOGPROBS)
    return int(count)


def _stop_texts(stops: Sequence[str]) -> tuple[str, ...]:
    _in_range("sampling.stop", len(stops), 0, MAX_STOPS)
    if not all(stops):
        raise InvalidRequest("a stop text is empty", field="sampling.stop")
    return tuple(stops)


def _constraint(structure: engine_pb2.Structure, codec: TextCodec) -> Constraint | None:
    match structure.WhichOneof("kind"):
        case "json_schema":
            return codec.grammars.json_schema(structure.json_schema)
        case "json_object":
            return codec.grammars.json_object() if structure.json_object else None
        case "regex":
            return codec.grammars.regex(structure.regex)
        case "grammar":
            return codec.grammars.grammar(structure.grammar)
        case "choice":
            return codec.grammars.choice(structure.choice.options)
        case _:
            return None


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
