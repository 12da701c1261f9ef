"""Waiting and running sequences → rows of the next step; tokens → events. Plain Python.

It decides and never runs; the runner runs and never decides.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from engine_service.core.blocks import BlockPool
from engine_service.core.messages import Row
from engine_service.core.request import Finish, GenerationRequest, Sequence, TokenEvent
from engine_service.errors import InvalidRequest, QueueFull
from relay_service.core.instance import Weights

MAX_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that requests are held to."""

    max_context_tokens: int
    max_running: int
    max_waiting: int
    kv_block_tokens: int


class Scheduler:
    """Continuous batching: sequences join and leave between any two steps."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.generated_tokens = 0
        self.finished: Counter[Finish] = Counter()
        """Requests that have ended, by reason."""

    def add(self, request: GenerationRequest) -> Sequence:
        """Queues a request.

        Raises `InvalidRequest` for one that can never be served, `QueueFull` when
        too many wait.
        """
        self._check_fits(request)
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests wait already",
                field="max_waiting", expected=str(self.limits.max_waiting),
            )  # fmt: skip
        sequence = Sequence(request)
        self.waiting.append(sequence)
        return sequence

    def schedule(self) -> list[Sequence]:
        """Chooses the sequences of the next step and gives them the blocks they need.

        Running ones first, oldest first; then as many waiting ones as fit.
        """
        for sequence in list(self.running):
            while sequence in self.running and not self._grow(sequence):
                self._preempt(self.running[-1])
        budget = MAX_PREFILL_TOKENS
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            fits = len(sequence.pending) <= budget or budget == MAX_PREFILL_TOKENS
            if not fits or not self._grow(sequence):
                break
            budget -= len(sequence.pending)
            self.running.append(self.waiting.popleft())
        return list(self.running)

    def commit(self, batch: list[Sequence], tokens: tuple[int, ...], weights: Weights) -> None:
        """Books the tokens of a step and publishes them. Sequences that left are skipped."""
        for sequence, token in zip(batch, tokens, strict=True):
            if sequence.finish is not None:
                continue
            sequence.cached = sequence.length
            sequence.output.append(token)
            self.generated_tokens += 1
            finish = self._ends(sequence, token)
            sequence.events.put_nowait(TokenEvent(token, weights, finish))
            if finish:
                self.remove(sequence, finish)

    def remove(self, sequence: Sequence, finish: Finish) -> None:
        """Takes a sequence out, wherever it is, and frees its KV. Twice is harmless."""
        if sequence.finish is None:
            sequence.finish = finish
            self.finished[finish] += 1
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.release(sequence.blocks)

    def abort_all(self, weights: Weights) -> None:
        """Ends every sequence with what it has."""
        for sequence in [*self.running, *self.waiting]:
            self.remove(sequence, Finish.ABORT)
            sequence.events.put_nowait(TokenEvent(None, weights, Finish.ABORT))

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with an error."""
        self.fail([*self.running, *self.waiting], error)

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        """Ends some sequences with an error."""
        for sequence in sequences:
            self.remove(sequence, Finish.ABORT)
            sequence.events.put_nowait(error)

    def _check_fits(self, request: GenerationRequest) -> None:
        most = min(self.limits.max_context_tokens, self.pool.total * self.pool.block_tokens)
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if len(request.prompt) >= most:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt)} tokens, "
                f"prompt and answer may have {most} together",
                field="prompt", expected=f"less than {most}", found=str(len(request.prompt)),
            )  # fmt: skip

    def _grow(self, sequence: Sequence) -> bool:
        return self.pool.grow(sequence.blocks, sequence.length)

    def _preempt(self, sequence: Sequence) -> None:
        """Sends the youngest back to the queue; its KV is computed again later."""
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.cached = 0
        self.waiting.appendleft(sequence)

    def _ends(self, sequence: Sequence, token: int) -> Finish | None:
        if token in sequence.request.stop_ids:
            return Finish.STOP
        most = min(self.limits.max_context_tokens, self.pool.total * self.pool.block_tokens)
        if len(sequence.output) >= sequence.request.max_tokens or sequence.length >= most:
            return Finish.LENGTH
        return None


def row_of(sequence: Sequence) -> Row:
    """Returns a sequence's share of the next step."""
    return Row(
        sequence.pending, sequence.cached, tuple(sequence.blocks), len(sequence.output),
        sequence.request.sampling,
    )  # fmt: skip
