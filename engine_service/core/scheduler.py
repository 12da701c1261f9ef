"""Waiting and running sequences → rows of the next step; tokens → events. Plain Python.

It decides and never runs; the runner runs and never decides.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

from engine_service.core.blocks import BlockPool
from engine_service.core.prefix import publish, reuse
from engine_service.core.request import (
    Finish,
    GenerationRequest,
    Sequence,
    TokenEvent,
    answers_to,
)
from engine_service.core.step_messages import Sampled, TokenLogprobs
from engine_service.errors import EngineError, InvalidRequest, QueueFull, RequestExists
from relay_service.core.instance import Weights


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that requests are held to."""

    max_context_tokens: int
    max_running: int
    max_waiting: int
    kv_block_tokens: int
    prefill_chunk_tokens: int = 512
    """Most prompt tokens that one step computes, so that running answers go on meanwhile."""


class Scheduler:
    """Continuous batching: sequences join and leave between any two steps."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        """In the order in which they will run."""
        self.running: list[Sequence] = []
        """In the order in which they began to run."""
        self.admits_new = True
        """Whether requests that have not begun may begin."""
        self.degraded = False
        """Whether tokens are marked: experts are lost, and others serve in their place."""
        self.generated_tokens = 0
        self.finished: Counter[Finish] = Counter()
        """Answers that have ended, by reason."""
        self.retracted = 0
        """How often `retract` has sent an answer back to the queue."""

    @property
    def begun(self) -> list[Sequence]:
        """Answers that run, or have run and are in the queue again."""
        return [*self.running, *(one for one in self.waiting if one.begun)]

    @property
    def queued(self) -> int:
        """Answers that have not begun; those that were sent back to the queue had their place."""
        return sum(not one.begun for one in self.waiting)

    @property
    def max_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return min(self.limits.max_context_tokens, self.pool.total * self.pool.block_tokens)

    def add(self, request: GenerationRequest, answers: int = 1) -> list[Sequence]:
        """Queues a request, to be answered so many times.

        Raises `InvalidRequest` for one that can never be served, `QueueFull` when
        too many wait, `RequestExists` when its name is taken.
        """
        self._check_fits(request, answers)
        if self.queued + answers > self.limits.max_waiting:
            raise QueueFull(
                f"{self.queued} requests wait already",
                field="max_waiting", expected=str(self.limits.max_waiting),
            )  # fmt: skip
        if self.named(request.request):
            raise RequestExists(
                f"a request named {request.request!r} is being served",
                field="request", found=request.request,
            )  # fmt: skip
        sequences = answers_to(request, answers)
        for sequence in sequences:
            bisect.insort(self.waiting, sequence, key=_order)
        return sequences

    def named(self, request: str) -> list[Sequence]:
        """Returns the answers that are being made to a request; an empty name is nobody's."""
        if not request:
            return []
        return [s for s in (*self.running, *self.waiting) if s.request.request == request]

    def schedule(self, weights: Weights) -> list[Sequence]:
        """Chooses the sequences of the next step and gives them the blocks they need.

        All that decode, then as much of prompts as a step may compute: running ones first,
        then waiting ones as far as they fit. Nobody overtakes one that waits for blocks.
        """
        for sequence in sorted(self.running, key=_order):
            while sequence in self.running and not self._grow(sequence):
                self._preempt(max(self.running, key=_order))
        budget = self.limits.prefill_chunk_tokens
        for sequence in self.running:
            sequence.chunk = 1 if sequence.pending == 1 else min(sequence.pending, budget)
            budget -= sequence.chunk if sequence.pending > 1 else 0
        for sequence in [one for one in self.waiting if self._may_run(one)]:
            if budget <= 0 or len(self.running) >= self.limits.max_running:
                break
            if not self._admit(sequence, weights):
                break
            sequence.chunk = min(sequence.pending, budget)
            budget -= sequence.chunk
        return [sequence for sequence in self.running if sequence.chunk]

    def commit(self, batch: list[Sequence], sampled: Sampled, weights: Weights) -> None:
        """Books what a step made and publishes it. Sequences that left are skipped."""
        for row, (sequence, token) in enumerate(zip(batch, sampled.tokens, strict=True)):
            if sequence.finish is not None:
                continue
            sequence.cached += sequence.chunk
            publish(self.pool, sequence, weights)
            sequence.prompt_logprobs += sampled.prompt_logprobs.get(row, ())
            if sequence.cached < sequence.length:
                continue
            self._take(sequence, token, weights, sampled.logprobs.get(row))

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

    def retract(self, sequences: list[Sequence]) -> int:
        """Sends running sequences back to the queue and frees their KV; returns how many."""
        for sequence in (retracted := list(sequences)):
            self._preempt(sequence)
        self.retracted += len(retracted)
        return len(retracted)

    def abort(self, sequences: list[Sequence], weights: Weights) -> None:
        """Ends some sequences with what they have."""
        for sequence in sequences:
            self.remove(sequence, Finish.ABORT)
            ended = TokenEvent(None, weights, Finish.ABORT, index=sequence.index)
            sequence.events.put_nowait(ended)

    def abort_all(self, weights: Weights) -> None:
        """Ends every sequence with what it has."""
        self.abort([*self.running, *self.waiting], weights)

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with an error."""
        self.fail([*self.running, *self.waiting], error)

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        """Ends some sequences with an error."""
        for sequence in sequences:
            self.remove(sequence, Finish.ERROR)
            sequence.events.put_nowait(error)

    def _check_fits(self, request: GenerationRequest, answers: int) -> None:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if len(request.prompt) >= self.max_tokens:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt)} tokens, "
                f"prompt and answer may have {self.max_tokens} together",
                field="prompt", expected=f"less than {self.max_tokens}",
                found=str(len(request.prompt)),
            )  # fmt: skip
        if answers > self.limits.max_waiting:
            raise InvalidRequest(
                f"{answers} answers are more than may ever wait", field="sampling.n",
                expected=f"at most {self.limits.max_waiting}", found=str(answers),
            )  # fmt: skip

    def _admit(self, sequence: Sequence, weights: Weights) -> bool:
        """Lets a sequence run if its blocks fit, with the KV that others have computed."""
        reuse(self.pool, sequence, weights)
        if not self._grow(sequence):
            self.pool.release(sequence.blocks)
            sequence.cached = 0
            return False
        if not sequence.output:
            sequence.reused = sequence.cached
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.begun = True
        return True

    def _may_run(self, sequence: Sequence) -> bool:
        """Whether it may begin, and need not wait for the KV of another answer to its prompt."""
        leader, may_begin = sequence.leader, self.admits_new or sequence.begun
        return may_begin and not (leader and leader.finish is None and not leader.output)

    def _grow(self, sequence: Sequence) -> bool:
        return self.pool.grow(sequence.blocks, sequence.length)

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a sequence back to the queue; its KV is computed, or found, again later."""
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.cached = sequence.chunk = 0
        sequence.prompt_logprobs.clear()
        bisect.insort(self.waiting, sequence, key=_order)

    def _take(
        self, sequence: Sequence, token: int, weights: Weights, logprobs: TokenLogprobs | None
    ) -> None:
        """Books and publishes a token."""
        sequence.output.append(token)
        self.generated_tokens += 1
        try:
            finish = sequence.ends_with(token, self.max_tokens)
        except EngineError as error:
            self.fail([sequence], error)
            return
        event = TokenEvent(
            token, weights, finish, logprobs, tuple(sequence.prompt_logprobs), sequence.index,
            sequence.reused, self.degraded,
        )  # fmt: skip
        sequence.prompt_logprobs.clear()
        sequence.events.put_nowait(event)
        if finish:
            self.remove(sequence, finish)


def _order(sequence: Sequence) -> tuple[int, int]:
    """Sorts by who runs first: the higher priority, then who came first."""
    return -sequence.request.priority, sequence.number
