"""Runs one step: rows in, at most one token per row out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_service.core.step_messages import Row, Sampled, TokenLogprobs
from engine_service.device.batch import Batch, make_batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.logits import logprobs
from engine_service.device.models.llama import Llama
from engine_service.device.sampler import sample

_LOGITS_ROWS = 32


class Graphs(Protocol):
    """The captured decode pass of one model."""

    proven: bool
    """Whether `capture` itself has compared replay with eager."""

    @property
    def compiled(self) -> bool:
        """Whether a layer that was compiled ahead of time is replayed."""

    @property
    def captured(self) -> bool:
        """Whether `replay` may be called."""

    def capture(self) -> None:
        """Captures. Raises `CaptureError`."""

    def replay(self, batch: Batch) -> Tensor:
        """Returns the logits of a decode batch, `[rows, vocab_size]`."""


class Runner:
    """Prefills eagerly and one by one; decodes in one batch through the captured graph."""

    def __init__(self, model: Llama, cache: KVCache, graphs: Graphs) -> None:
        self._model = model
        self._cache = cache
        self._graphs = graphs

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> Sampled:
        """Runs rows and samples where a token is wanted.

        Raises `InvalidRequest` for a row that does not fit and `NonFiniteLogits`.
        """
        found: dict[int, Tensor] = {}
        prompt_logprobs = {}
        decoding = [index for index, row in enumerate(rows) if len(row.tokens) == 1]
        for index, row in enumerate(rows):
            if len(row.tokens) == 1:
                continue
            hidden = self._hidden(row)
            if row.following:
                prompt_logprobs[index] = tuple(self._prompt_logprobs(row, hidden))
            if row.samples:
                found[index] = self._model.head.forward(hidden[-1:])[0]
        logits = torch.empty(0)
        if decoding:
            logits = self.decode([rows[index] for index in decoding])
            found |= zip(decoding, logits, strict=True)
            prompt_logprobs |= _of_single_tokens(rows, found)
        wanted = [index for index, row in enumerate(rows) if row.samples]
        if wanted and wanted != decoding:
            logits = torch.stack([found[index] for index in wanted])
        return _sampled(rows, wanted, logits, prompt_logprobs)

    def prefill(self, row: Row) -> Tensor:
        """Returns the logits after a row's last token, `[1, vocab_size]`."""
        return self._model.head.forward(self._hidden(row)[-1:])

    def decode(self, rows: Sequence[Row]) -> Tensor:
        """Returns the logits after one token of each row, `[rows, vocab_size]`."""
        batch = make_batch(rows, self._cache, self._model.config.vocab_size)
        return self._graphs.replay(batch)

    def _hidden(self, row: Row) -> Tensor:
        batch = make_batch([row], self._cache, self._model.config.vocab_size)
        return self._model.hidden(batch, self._cache)

    def _prompt_logprobs(self, row: Row, hidden: Tensor) -> Iterator[TokenLogprobs]:
        """Yields those of the tokens that follow; few rows of logits exist at a time."""
        for begin in range(0, len(row.following), _LOGITS_ROWS):
            following = row.following[begin : begin + _LOGITS_ROWS]
            logits = self._model.head.forward(hidden[begin : begin + len(following)])
            for scores, token in zip(logits, following, strict=True):
                yield logprobs(scores, token, row.sampling.prompt_logprobs or 0)


def _of_single_tokens(
    rows: Sequence[Row], found: Mapping[int, Tensor]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """A chunk of one token runs as a decode; its logits are those of what follows."""
    return {
        index: (logprobs(found[index], row.following[0], row.sampling.prompt_logprobs or 0),)
        for index, row in enumerate(rows)
        if row.following and len(row.tokens) == 1
    }


def _sampled(
    rows: Sequence[Row],
    wanted: Sequence[int],
    logits: Tensor,
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]],
) -> Sampled:
    """Samples the `wanted` rows, whose logits are given in their order."""
    tokens, own = [-1] * len(rows), {}
    if wanted:
        chosen = sample(logits, [rows[index] for index in wanted])
        for index, token, scores in zip(wanted, chosen, logits, strict=True):
            tokens[index] = token
            count = rows[index].sampling.logprobs
            if count is not None:
                own[index] = logprobs(scores, token, count)
    return Sampled(tuple(tokens), own, prompt_logprobs)
