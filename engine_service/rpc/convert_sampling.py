"""What both protocols say of choosing tokens → core records, checked by field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from engine_service.core.ports import Constraint
from engine_service.core.step_messages import Sampling
from engine_service.core.tokenizer import TextCodec
from engine_service.errors import InvalidRequest

MAX_TOKENS = 1 << 20
MAX_TEMPERATURE = 100.0
MAX_ANSWERS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 16


class Lengths(TypedDict):
    """The most and the fewest tokens of an answer."""

    max_tokens: int
    min_tokens: int


class SamplingFields:
    """The fields of a `SamplingParams` that both protocols have, by the same name.

    Every method raises `InvalidRequest` with the path of the field.
    """

    def __init__(self, path: str, params: Any, codec: TextCodec) -> None:
        """Takes the path of the message, for the errors, and the message of either protocol."""
        self._path = path
        self._params = params
        self._codec = codec

    def sampling(self, temperature: float, seed: int) -> Sampling:
        """Returns how tokens are chosen. What unset means for these two, the protocols differ."""
        params = self._params
        self.in_range("temperature", temperature, 0, MAX_TEMPERATURE)
        self._check("top_k", 0, 1 << 30)
        self._check("top_p", 0, 1)
        self._check("min_p", 0, 1)
        self._check("presence_penalty", -2, 2)
        self._check("frequency_penalty", -2, 2)
        self._check("repetition_penalty", 0, 100)
        return Sampling(
            temperature=temperature,
            top_k=params.top_k,
            top_p=params.top_p or 1.0,
            min_p=params.min_p,
            seed=seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty or 1.0,
            logit_bias=self._logit_bias(params.logit_bias),
            logprobs=self._logprobs("logprobs"),
            prompt_logprobs=self._logprobs("prompt_logprobs"),
        )

    def lengths(self, max_tokens: int) -> Lengths:
        """Returns the most and the fewest tokens of an answer."""
        self.in_range("max_tokens", max_tokens, 1, MAX_TOKENS)
        self._check("min_tokens", 0, max_tokens)
        return {"max_tokens": max_tokens, "min_tokens": self._params.min_tokens}

    def stop_ids(self) -> frozenset[int]:
        """Returns the tokens that end an answer, the model's own unless it ignores them."""
        path = f"{self._path}.stop_token_ids"
        asked = frozenset(checked_ids(path, self._params.stop_token_ids, self._codec))
        return asked if self._params.ignore_eos else asked | self._codec.end_ids

    def stop_texts(self) -> tuple[str, ...]:
        """Returns the texts that end an answer."""
        stops: Sequence[str] = self._params.stop
        self.in_range("stop", len(stops), 0, MAX_STOPS)
        if not all(stops):
            raise InvalidRequest("a stop text is empty", field=f"{self._path}.stop")
        return tuple(stops)

    def answers(self) -> int:
        """Returns how many answers are asked for."""
        self._check("n", 0, MAX_ANSWERS)
        return int(self._params.n) or 1

    def in_range(self, field: str, value: float, least: float, most: float) -> None:
        """Refuses a value out of bounds, and one that is no number."""
        in_range(f"{self._path}.{field}", value, least, most)

    def _check(self, field: str, least: float, most: float) -> None:
        self.in_range(field, getattr(self._params, field), least, most)

    def _logit_bias(self, biases: Mapping[int, float]) -> dict[int, float]:
        self.in_range("logit_bias", len(biases), 0, MAX_BIASES)
        checked_ids(f"{self._path}.logit_bias", biases, self._codec)
        for bias in biases.values():
            self.in_range("logit_bias", bias, -100, 100)
        return dict(biases)

    def _logprobs(self, field: str) -> int | None:
        if not self._params.HasField(field):
            return None
        self._check(field, 0, MAX_LOGPROBS)
        return int(getattr(self._params, field))


def constraint(kind: str, value: Any, codec: TextCodec) -> Constraint | None:
    """Returns what an answer must look like. Raises `InvalidRequest`.

    Args:
        kind: `json_schema`, `json_object`, `regex`, `grammar` or `choice`.
        value: Text; whether, for `json_object`; texts, for `choice`.
        codec: Compiles it.
    """
    if kind == "json_object":
        return codec.grammars.json_object() if value else None
    compiled: Constraint = getattr(codec.grammars, kind)(value)
    return compiled


def checked_ids(field: str, ids: Iterable[int], codec: TextCodec) -> list[int]:
    """Returns token ids, each within the vocabulary. Raises `InvalidRequest`."""
    checked = list(ids)
    for token in checked:
        in_range(field, token, 0, codec.vocab_size - 1)
    return checked


def in_range(field: str, value: float, least: float, most: float) -> None:
    """Refuses a value out of bounds, and one that is no number. Raises `InvalidRequest`."""
    if math.isnan(value) or not least <= value <= most:
        numbers = (value, least, most)
        found, low, high = (f"{n:g}" if isinstance(n, float) else str(n) for n in numbers)
        raise InvalidRequest(
            f"{field} is {found}, it must be from {low} to {high}",
            field=field, expected=f"{low}..{high}", found=found,
        )  # fmt: skip
