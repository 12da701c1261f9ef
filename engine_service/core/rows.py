"""A sequence's share of the next step, as the ranks are told. Plain Python."""

from __future__ import annotations

from engine_service.core.request import Sequence
from engine_service.core.step_messages import Row


def row_of(sequence: Sequence) -> Row:
    """Returns what the next step computes for a sequence, and how it samples."""
    request, begin = sequence.request, sequence.cached
    end = begin + sequence.chunk
    samples = end == sequence.length
    looks_back = samples and request.sampling.looks_back
    constraint = request.constraint if samples else None
    return Row(
        sequence.part(begin, end), begin, tuple(sequence.blocks), len(sequence.output),
        request.sampling, samples,
        prompt=request.prompt if looks_back else (),
        output=tuple(sequence.output) if looks_back else (),
        banned=tuple(request.stop_ids) if len(sequence.output) < request.min_tokens else (),
        allowed=constraint.allowed() if constraint else b"",
        following=_following(sequence, begin, end),
    )  # fmt: skip


def _following(sequence: Sequence, begin: int, end: int) -> tuple[int, ...]:
    if sequence.request.sampling.prompt_logprobs is None or sequence.output:
        return ()
    return sequence.request.prompt[begin + 1 : end + 1]
