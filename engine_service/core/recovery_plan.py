"""What each rank must get so that the experts lie as a new map says, and who gives it. Plain Python.

What a rank that lives holds is taken from there. What nobody holds is missing, and comes from
outside: those units and no others, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine_service.core.expert_map import ExpertMap
from engine_service.core.member_messages import Wanted
from relay_service.core.manifest import Manifest, Unit


class Missing(NamedTuple):
    """A unit that nobody here holds."""

    part: int
    """Tensor-parallel part of it."""
    unit: Unit
    """As a lost rank held it: tensors, size and the digests that it must have."""


class Take(NamedTuple):
    """Units that one rank takes out of one memory."""

    target: int
    """Rank among the new members."""
    source: int
    """Index of the holder."""
    wanted: tuple[Wanted, ...]


class RecoveryPlan(NamedTuple):
    """Who takes what from where."""

    takes: tuple[Take, ...]
    missing: tuple[Missing, ...]
    """Each once, however many ranks want it."""
    wanted: dict[int, tuple[Wanted, ...]]
    """By rank among the new members: what it takes of what is missing."""


def plan(
    experts: ExpertMap,
    targets: Sequence[Manifest],
    holders: Sequence[Manifest],
    known: Sequence[Manifest],
    parts: int,
) -> RecoveryPlan:
    """Plans how members come to hold what a map says.

    Args:
        experts: The new map, a row for each group.
        targets: By rank of the new members: what it holds now, as it is called there. A fresh
            rank has no digests, is called as in the new map, and wants everything.
        holders: Memory that may be taken from, all of it verified; parts in turns as ranks are
            (`holders[i]` is of part `i % parts`).
        known: Like `holders`, of the instance when it was whole: the digests that all must have.
        parts: Tensor-parallel ranks of each group.
    """
    raise NotImplementedError
