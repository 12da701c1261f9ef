"""What a check of weights is asked, and what it found. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine_service.core.check_messages import FoundWeights
from relay_service.core.instance import Weights


class CheckMode(StrEnum):
    """What lies in memory is compared with something."""

    DIGEST = "digest"
    """What was verified when it came."""
    SNAPSHOT = "snapshot"
    """Nothing: it is remembered."""
    COMPARE = "compare"
    """What was remembered."""
    DIFF = "diff"
    """What another instance holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not as it should be."""

    rank: int
    tensor: str
    """Name in the arena; empty for bytes that belong to none."""
    block: int = -1
    """Flat index of the first block of the rank that differs; -1 where that says nothing."""
    what: str
    """In words."""
    expected: str = ""
    """A digest in hexadecimal for contents."""
    found: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a check found."""

    mode: CheckMode
    ranks: tuple[FoundWeights, ...]
    differences: tuple[Difference, ...]
    weights: Weights
    """Those that were checked."""
    against: str
    """What they were compared with, in words."""
    ended_at: float
    """Seconds since the epoch of Unix."""
    seconds: float
    seconds_paused: float
    """In which no step could run."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences
