"""The gateway's messages ↔ core records of a request and of its answers.

The protocol is `vllm.grpc.engine` of the wheel smg-grpc-proto. Text is the gateway's:
it sends tokens and takes tokens.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from engine_service.core.answers import Ending, Piece
from engine_service.core.ports import Constraint
from engine_service.core.request import GenerationRequest
from engine_service.core.step_messages import TokenLogprobs
from engine_service.core.tokenizer import TextCodec
from engine_service.errors import InvalidRequest
from engine_service.rpc.convert_sampling import (
    MAX_TOKENS,
    SamplingFields,
    checked_ids,
    constraint,
)

DEFAULT_TEMPERATURE = 1.0
NOT_SUPPORTED = frozenset(
    {"mm_inputs", "extra_mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"}
)
"""Fields of a request that ask for what the engine does not do; refused, never ignored."""
_SEEDS = 1 << 64


def request_from_proto(
    message: vllm_engine_pb2.GenerateRequest, codec: TextCodec
) -> tuple[GenerationRequest, int]:
    """Returns a checked and tokenized request, and how many answers it wants.

    Unset, a temperature is 1, an answer may fill the context, and a seed is fresh.
    Raises `InvalidRequest` by field.
    """
    _refuse_unsupported(message)
    params = message.sampling_params
    fields = SamplingFields("sampling_params", params, codec)
    temperature = params.temperature if params.HasField("temperature") else DEFAULT_TEMPERATURE
    seed = params.seed % _SEEDS if params.HasField("seed") else secrets.randbits(63)
    wanted = GenerationRequest(
        prompt=_prompt(message, fields, codec),
        sampling=fields.sampling(temperature, seed),
        **fields.lengths(params.max_tokens if params.HasField("max_tokens") else MAX_TOKENS),
        stop_ids=fields.stop_ids(),
        stop_texts=fields.stop_texts(),
        shows_stop=params.include_stop_str_in_output,
        constraint=_constraint(params, codec),
        request=message.request_id,
    )
    return wanted, fields.answers()


def _refuse_unsupported(message: vllm_engine_pb2.GenerateRequest) -> None:
    for descriptor, value in message.ListFields():
        asks_rank = descriptor.name == "data_parallel_rank" and value != 0
        if descriptor.name in NOT_SUPPORTED or asks_rank:
            raise InvalidRequest(
                f"{descriptor.name} is not supported by this engine", field=descriptor.name
            )


def _prompt(
    message: vllm_engine_pb2.GenerateRequest, fields: SamplingFields, codec: TextCodec
) -> tuple[int, ...]:
    match message.WhichOneof("input"):
        case "tokenized":
            ids = message.tokenized.input_ids
            prompt = tuple(checked_ids("tokenized.input_ids", ids, codec))
        case "text":
            prompt = codec.encode(message.text)
        case _:
            raise InvalidRequest("tokenized or text is needed", field="input")
    params = message.sampling_params
    if not params.HasField("truncate_prompt_tokens"):
        return prompt
    fields.in_range("truncate_prompt_tokens", params.truncate_prompt_tokens, 1, MAX_TOKENS)
    return prompt[-params.truncate_prompt_tokens :]


def _constraint(params: vllm_engine_pb2.SamplingParams, codec: TextCodec) -> Constraint | None:
    kind = params.WhichOneof("constraint")
    if kind == "structural_tag":
        raise InvalidRequest(
            "structural_tag is not supported by this engine",
            field="sampling_params.structural_tag", hint="send json_schema or grammar",
        )  # fmt: skip
    if kind is None:
        return None
    value = getattr(params, kind)
    return constraint(kind, value.choices if kind == "choice" else value, codec)


@dataclass(slots=True)
class _Part:
    """What has come of one answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class AnswerWriter:
    """Turns the pieces of all answers to one request into its messages."""

    def __init__(self, message: vllm_engine_pb2.GenerateRequest, wanted: GenerationRequest) -> None:
        self._streams = message.stream
        self._asked_stops = frozenset(message.sampling_params.stop_token_ids)
        self._prompt = wanted.prompt
        self._parts: defaultdict[int, _Part] = defaultdict(_Part)

    def take(self, piece: Piece) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yields a chunk per token, where the caller streams, and what completes an answer."""
        part = self._parts[piece.index]
        part.tokens += piece.tokens
        if self._streams:
            if piece.tokens:
                yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(piece))
        else:
            part.logprobs += piece.logprobs
            part.prompt_logprobs = part.prompt_logprobs or piece.prompt_logprobs
        if piece.ending:
            complete = self._complete(piece, piece.ending, part)
            yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _chunk(self, piece: Piece) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=piece.tokens, completion_tokens=len(piece.tokens),
            output_logprobs=_output_logprobs(piece.logprobs),
            input_logprobs=self._input_logprobs(piece.prompt_logprobs),
            **self._counts(piece),
        )  # fmt: skip

    def _complete(
        self, piece: Piece, ending: Ending, part: _Part
    ) -> vllm_engine_pb2.GenerateComplete:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=part.tokens, completion_tokens=ending.completion_tokens,
            finish_reason=str(ending.finish),
            output_logprobs=_output_logprobs(part.logprobs),
            input_logprobs=self._input_logprobs(part.prompt_logprobs),
            **self._counts(piece),
        )  # fmt: skip
        if isinstance(ending.stop, str):
            complete.matched_stop_str = ending.stop
        elif ending.stop in self._asked_stops:  # of an end-of-sequence token nothing is said
            complete.matched_token_id = ending.stop
        return complete

    def _counts(self, piece: Piece) -> dict[str, int]:
        return {
            "index": piece.index,
            "prompt_tokens": len(self._prompt),
            "cached_tokens": piece.reused_tokens,
        }

    def _input_logprobs(
        self, positions: tuple[TokenLogprobs, ...]
    ) -> vllm_engine_pb2.InputLogProbs | None:
        """Nothing comes before the first token of a prompt, so it has no probability."""
        if not positions:
            return None
        one = vllm_engine_pb2.InputTokenLogProb
        return vllm_engine_pb2.InputLogProbs(
            token_logprobs=[one(), *(one(value=p.logprob) for p in positions)],
            token_ids=self._prompt,
            top_logprobs=[vllm_engine_pb2.TopLogProbs(), *_tops(positions)],
        )


def _output_logprobs(
    positions: Sequence[TokenLogprobs],
) -> vllm_engine_pb2.OutputLogProbs | None:
    if not positions:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[p.logprob for p in positions],
        token_ids=[p.token for p in positions],
        top_logprobs=_tops(positions),
    )


def _tops(positions: Iterable[TokenLogprobs]) -> list[Any]:
    return [
        vllm_engine_pb2.TopLogProbs(
            token_ids=[token for token, _ in p.top], values=[logprob for _, logprob in p.top]
        )
        for p in positions
    ]
