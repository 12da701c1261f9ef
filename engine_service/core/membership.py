"""Which ranks compute together, and what a change of that did. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from engine_service.core.rank_worker import RankWorker


class MembershipState(StrEnum):
    """How far an expert-parallel instance is from being whole."""

    WHOLE = "whole"
    DEGRADED = "degraded"
    """Ranks were lost; every expert still has a replica."""
    ROUTED = "routed"
    """Experts were lost, and others serve in their place."""
    HELD = "held"
    """Experts were lost, and requests wait until they are back."""


class Member(NamedTuple):
    """A rank that lives."""

    rank: int
    group: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One decision about who computes together, the same for all ranks."""

    epoch: int
    """Counts the decisions, from 1."""
    state: MembershipState
    members: tuple[Member, ...]
    groups_lost: int = 0
    """Lost and not replaced, since the instance was whole."""
    lost: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Experts that no rank holds, by layer."""
    reason: str = ""
    """Why ranks were lost last, or why they could not be recovered."""


def members_of(workers: Sequence[RankWorker], parts: int) -> tuple[Member, ...]:
    """Returns the ranks of groups of so many `parts`, in order."""
    return tuple(Member(rank, rank // parts, worker.pid) for rank, worker in enumerate(workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProgress:
    """How far a recovery or a scaling is."""

    phase: str
    """`planning`, `starting`, `copying`, `pulling`, `reading`, `staging`, `committing`, `proving`
    or `done`."""
    bytes_done: int = 0
    bytes_total: int = 0
    source: str = ""
    """Who gives what comes now: an instance or a folder."""
    note: str = ""


OnExpertProgress = Callable[[ExpertProgress], None]


class PulledUnit(NamedTuple):
    """A unit that came from outside."""

    unit: str
    part: int
    """Tensor-parallel part of it."""
    nbytes: int
    source: str
    """`relay:INSTANCE` or `disk:FOLDER`."""


@dataclass(slots=True, kw_only=True)
class ExpertReport:
    """What a recovery or a scaling did."""

    pulled: tuple[PulledUnit, ...] = ()
    bytes_copied: int = 0
    """That ranks took from ranks that live."""
    experts_moved: int = 0
    """Slots that got another expert, of ranks that lived before."""
    ranks_started: int = 0
    seconds_started: float = 0.0
    """Until new ranks were there; they start while others are read."""
    seconds_pulled: float = 0.0
    seconds_paused: float = 0.0
    """In which no step could run because of the commit."""
    seconds: float = 0.0

    @property
    def bytes_pulled(self) -> int:
        """From outside."""
        return sum(one.nbytes for one in self.pulled)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverOptions:
    """How to recover."""

    replace: bool = False
    """Start ranks in the place of the lost ones, also where slots of the others suffice."""
    source: str = ""
    """The only source: an instance, or `disk`; empty for any."""
