"""What is asked of a pause, and what becomes of requests then, by mode. Plain Python.

mode      those that have begun             KV          versions in one answer
abort     end now, with what they have      freed       one
wait      finish first                      freed       one
keep      freeze, and go on afterwards      stays       several
retract   back to the queue                 made anew   several

Requests that have not begun stay queued in every mode: whatever serves afterwards makes
the whole of their answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine_service.core.scheduler import Scheduler
from relay_service.core.instance import Weights


class PauseMode(StrEnum):
    """What becomes of requests that have begun."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
    RETRACT = "retract"


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """How to pause."""

    mode: PauseMode
    clear_cache: bool | None = None
    """Whether the prefix cache is emptied; unset means yes, except where requests are kept."""
    deadline_seconds: float | None = None
    """Time for running requests to finish, in `WAIT`, and for a commit to get its turn."""
    on_deadline: PauseMode | None = None
    """What becomes of those that still run then; unset to give up."""
    operator: str = ""
    drain_delay_seconds: float = 0.0
    """Time in which health says so before the gate closes."""


@dataclass(slots=True)
class PauseCounts:
    """Answers by what a pause did to them."""

    paused: int = 0
    """Frozen, with their KV."""
    aborted: int = 0
    retracted: int = 0
    finished: int = 0
    """By themselves, while it waited for them."""
    waiting: int = 0
    """In the queue or at the gate, at the end."""


@dataclass(slots=True)
class PauseReport:
    """What a pause did."""

    requests: PauseCounts
    was_paused: bool
    flushed_blocks: int
    seconds: float
    """From the closing of the gate until nothing ran."""
    mode: PauseMode
    """The one that was used at last, or that of a pause that was there."""


@dataclass(slots=True)
class ResumeReport:
    """What going on did."""

    requests: PauseCounts
    was_paused: bool
    reserved_bytes_before: int = 0
    """By allocators of devices; 0 on the CPU, and where nothing was given back."""
    reserved_bytes_after: int = 0


def let_go(scheduler: Scheduler, mode: PauseMode, weights: Weights) -> PauseCounts:
    """Does to requests that have begun what a mode says; between two steps."""
    if mode is PauseMode.ABORT:
        begun = scheduler.begun
        scheduler.abort(begun, weights)
        return PauseCounts(aborted=len(begun))
    if mode is PauseMode.RETRACT:
        return PauseCounts(retracted=scheduler.retract(scheduler.running))
    return PauseCounts(paused=len(scheduler.running))
