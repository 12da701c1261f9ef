"""What each rank must get to hold what a new map says, and who gives it. Plain Python.

What a rank that lives holds is taken from there. What nobody holds is missing, and comes from
outside: those units and no others, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine_service.core.expert_map import ExpertMap
from engine_service.core.member_messages import Wanted
from relay_service.core.manifest import Manifest, Unit


class Holder(NamedTuple):
    """Memory that may be taken from."""

    part: int
    """Tensor-parallel part whose units lie there."""
    manifest: Manifest
    """Verified."""


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
    holders: Sequence[Holder],
    known: Sequence[Manifest],
    parts: int,
) -> RecoveryPlan:
    """Plans how members come to hold what a map says.

    Args:
        experts: The new map, a row for each group.
        targets: By rank of the new members: what it holds now, as it is called there. A fresh
            rank has no digests, is called as in the new map, and wants everything.
        holders: Memory that may be taken from.
        known: By rank of the instance when it was whole: the digests that all units must have.
        parts: Tensor-parallel ranks of each group.
    """
    raise NotImplementedError
