"""What each rank must get to hold what a new map says, and who gives it. Plain Python.

What a rank that lives holds is taken from there. What nobody holds is missing, and comes from
outside: those units and no others, each once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from engine_service.core.expert_map import ExpertMap
from engine_service.core.member_messages import Wanted
from engine_service.errors import RecoveryFailed
from relay_service.core.manifest import Manifest, Unit

_EXPERT = re.compile(r"layer\.(\d+)\.expert\.\d+")
_Key = tuple[int, str, tuple[bytes, ...]]
"""Tensor-parallel part, name and digests of a unit."""


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

    Raises `RecoveryFailed` for a unit that the map wants and `known` says nothing of.
    """
    right = _by_part(known, parts)
    places = _Places(holders)
    takes: defaultdict[tuple[int, int], list[Wanted]] = defaultdict(list)
    wanted: defaultdict[int, list[Wanted]] = defaultdict(list)
    missing: dict[tuple[int, str], Missing] = {}
    for target, manifest in enumerate(targets):
        group, part = divmod(target, parts)
        for unit, name in _to_hold(manifest, experts, group):
            must = right[part].get(name)
            if must is None:
                raise RecoveryFailed(f"{name}, part {part}: nobody knows what it must be")
            if (unit.name, unit.digests) == (name, must.digests):
                continue
            one = Wanted(name, unit.name, must.digests)
            if (source := places.give(part, must)) is not None:
                takes[target, source].append(one)
            else:
                wanted[target].append(one)
                missing.setdefault((part, name), Missing(part, must))
    return RecoveryPlan(
        tuple(Take(*way, tuple(units)) for way, units in sorted(takes.items())),
        tuple(missing.values()),
        {target: tuple(units) for target, units in wanted.items()},
    )


def awaited(experts: ExpertMap, known: Sequence[Manifest], rank: int, parts: int) -> Manifest:
    """Returns what a fresh rank will say that it holds: what the map wants, without digests.

    For a plan that need not wait for its start. `known` is that of `plan`.
    """
    like = known[rank % parts]
    units = tuple(
        msgspec.structs.replace(unit, name=name, digests=())
        for unit, name in _to_hold(like, experts, rank // parts)
    )
    return msgspec.structs.replace(like, rank=rank, units=units)


class _Places:
    """Who holds what, and how much each has given so far."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._given = [0] * len(holders)
        self._holders: defaultdict[_Key, list[int]] = defaultdict(list)
        for number, holder in enumerate(holders):
            for unit in holder.manifest.units:
                self._holders[holder.part, unit.name, unit.digests].append(number)

    def give(self, part: int, unit: Unit) -> int | None:
        """Returns the index of the holder that has given the least; none where none has it."""
        known = self._holders.get((part, unit.name, unit.digests), ())
        source = min(known, key=lambda number: self._given[number], default=None)
        if source is not None:
            self._given[source] += unit.nbytes
        return source


def _by_part(known: Sequence[Manifest], parts: int) -> list[dict[str, Unit]]:
    """Returns the verified units of each tensor-parallel part by name."""
    found: list[dict[str, Unit]] = [{} for _ in range(parts)]
    for rank, manifest in enumerate(known):
        for unit in manifest.units:
            if len(unit.digests) == unit.block_count:
                found[rank % parts].setdefault(unit.name, unit)
    return found


def _to_hold(manifest: Manifest, experts: ExpertMap, group: int) -> Iterator[tuple[Unit, str]]:
    """Yields each unit that has bytes, and what shall lie in its place."""
    slots = {layer: iter(rows[group]) for layer, rows in experts.layers.items()}
    for unit in manifest.units:
        name = unit.name
        if (found := _EXPERT.fullmatch(name)) and (layer := int(found[1])) in slots:
            name = f"layer.{layer}.expert.{next(slots[layer])}"
        if unit.nbytes:
            yield unit, name
