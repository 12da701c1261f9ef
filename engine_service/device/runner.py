"""Runs one step: rows in, one token per row out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_service.core.messages import Row
from engine_service.device.batch import Batch, make_batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.device.sampler import sample


class Graphs(Protocol):
    """The captured decode pass of one model."""

    proven: bool
    """Whether `capture` itself has compared replay with eager."""

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
    def step(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """Returns the sampled token of each row.

        Raises `InvalidRequest` for a row that does not fit and `NonFiniteLogits`.
        """
        logits = torch.empty(len(rows), self._model.config.vocab_size, device=self._cache.device)
        decoding = [index for index, row in enumerate(rows) if len(row.tokens) == 1]
        for index, row in enumerate(rows):
            if len(row.tokens) != 1:
                logits[index] = self.prefill(row)[0]
        if decoding:
            logits[decoding] = self.decode([rows[index] for index in decoding])
        samplings = [row.sampling for row in rows]
        return tuple(sample(logits, samplings, [row.output_index for row in rows]))

    def prefill(self, row: Row) -> Tensor:
        """Returns the logits after a row's last token, `[1, vocab_size]`."""
        batch = make_batch([row], self._cache, self._model.config.vocab_size)
        return self._model.forward(batch, self._cache)

    def decode(self, rows: Sequence[Row]) -> Tensor:
        """Returns the logits after one token of each row, `[rows, vocab_size]`."""
        batch = make_batch(rows, self._cache, self._model.config.vocab_size)
        return self._graphs.replay(batch)
