"""Protocol buffers → core records of a request: what is asked, checked by field."""

from __future__ import annotations

import secrets

from engine_service.core.ports import Constraint
from engine_service.core.request import GenerationRequest
from engine_service.core.tokenizer import TextCodec
from engine_service.errors import InvalidRequest
from engine_service.rpc.convert_sampling import SamplingFields, checked_ids, constraint
from seedrelay.v1 import engine_pb2

DEFAULT_MAX_TOKENS = 128


def request_from_proto(
    message: engine_pb2.GenerateRequest, codec: TextCodec
) -> tuple[GenerationRequest, int]:
    """Returns a checked and tokenized request, and how many answers it wants.

    Raises `InvalidRequest` by field.
    """
    params = message.sampling
    fields = SamplingFields("sampling", params, codec)
    seed = params.seed if params.HasField("seed") else secrets.randbits(63)
    wanted = GenerationRequest(
        prompt=_prompt(message, codec),
        sampling=fields.sampling(params.temperature, seed),
        **fields.lengths(params.max_tokens or DEFAULT_MAX_TOKENS),
        stop_ids=fields.stop_ids(),
        stop_texts=fields.stop_texts(),
        shows_stop=params.include_stop,
        priority=message.priority,
        constraint=_constraint(params.structure, codec),
        request=message.request,
        one_version=message.one_version,
        weight_version=message.weight_version,
        refuses_degraded=message.refuse_degraded,
    )
    return wanted, fields.answers()


def stream_interval(message: engine_pb2.GenerateRequest) -> int:
    """Returns the tokens of a message. Raises `InvalidRequest`."""
    if message.stream_interval < 0:
        raise InvalidRequest(
            f"stream_interval {message.stream_interval} is below 0",
            field="stream_interval", found=str(message.stream_interval), expected="0 or more",
        )  # fmt: skip
    return max(1, message.stream_interval)


def _prompt(message: engine_pb2.GenerateRequest, codec: TextCodec) -> tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            return codec.encode(message.text)
        case "tokens":
            return tuple(checked_ids("tokens.token_ids", message.tokens.token_ids, codec))
        case "chat":
            messages = [{"role": m.role, "content": m.content} for m in message.chat.messages]
            if not messages:
                raise InvalidRequest("a chat needs a message", field="chat.messages")
            return codec.encode_chat(messages)
        case _:
            raise InvalidRequest("text, chat or tokens is needed", field="prompt")


def _constraint(structure: engine_pb2.Structure, codec: TextCodec) -> Constraint | None:
    kind = structure.WhichOneof("kind")
    if kind is None:
        return None
    value = getattr(structure, kind)
    return constraint(kind, value.options if kind == "choice" else value, codec)
