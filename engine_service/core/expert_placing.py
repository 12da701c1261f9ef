"""Where experts lie when there are other groups of ranks than before. Plain Python.

Whoever lives keeps what it holds, as far as that goes: a slot gives way only where another
one holds the same expert, and only for one that nobody holds.
"""

from __future__ import annotations

from collections import Counter

from engine_service.core.expert_map import ExpertMap, Slots
from engine_service.errors import InvalidRequest

_Rows = list[list[int]]


def fits(experts: ExpertMap, groups: int) -> bool:
    """Returns whether so many groups have a slot for every expert."""
    return not _fault(experts, groups)


def regrouped(experts: ExpertMap, groups: int) -> ExpertMap:
    """Places all experts on so many groups, of as many slots as before.

    The rows of `experts` are the groups that live, in whose order the result begins; some
    experts may be in none of them. These go to fresh groups first, then to slots of those that
    live which hold a replica. Slots of fresh groups that are left get replicas of what has
    fewest. The same always comes of the same.

    Raises `InvalidRequest` where that cannot be.
    """
    if fault := _fault(experts, groups):
        raise InvalidRequest(fault, field="expert_parallel_size", found=str(groups))
    layers = {
        layer: _placed(rows, experts.experts, groups) for layer, rows in experts.layers.items()
    }
    return ExpertMap(experts.experts, layers)


def _fault(experts: ExpertMap, groups: int) -> str:
    """Says why so many groups cannot hold all experts; empty when they can."""
    for layer, rows in sorted(experts.layers.items()):
        slots = len(rows[0]) if rows else 0
        where = f"layer {layer}: {groups} groups of {slots} slots"
        if groups < len(rows):
            return f"{where}, and {len(rows)} groups live"
        if groups * slots < experts.experts:
            return f"{where} cannot hold {experts.experts} experts"
        if groups > len(rows) and slots > experts.experts:
            return f"{where} for {experts.experts} experts: one would be in a group twice"
    return ""


def _placed(rows: Slots, experts: int, groups: int) -> Slots:
    """Places the experts of one layer."""
    living, slots = [list(row) for row in rows], len(rows[0])
    counts = Counter(expert for row in living for expert in row)
    lost = [expert for expert in range(experts) if not counts[expert]]
    fresh: _Rows = [[] for _ in range(groups - len(rows))]
    room = slots * len(fresh)
    for number, expert in enumerate(lost[:room]):
        fresh[number % len(fresh)].append(expert)
        counts[expert] += 1
    _replace_replicas(living, counts, lost[room:])
    _fill(fresh, counts, range(experts), slots)
    return tuple(map(tuple, (*living, *fresh)))


def _replace_replicas(living: _Rows, counts: Counter[int], lost: list[int]) -> None:
    """Puts experts in the place of replicas: of those with most, by turns among the groups."""
    given = [0] * len(living)
    for expert in lost:
        spare = (
            (-counts[held], given[group], group, slot)
            for group, row in enumerate(living)
            for slot, held in enumerate(row)
            if counts[held] > 1
        )
        *_, group, slot = min(spare)
        counts[living[group][slot]] -= 1
        counts[expert] += 1
        living[group][slot] = expert
        given[group] += 1


def _fill(fresh: _Rows, counts: Counter[int], experts: range, slots: int) -> None:
    """Fills rows with replicas of what has fewest; no row gets what it has."""
    while unfinished := [row for row in fresh if len(row) < slots]:
        row = min(unfinished, key=len)
        expert = min((one for one in experts if one not in row), key=lambda one: counts[one])
        row.append(expert)
        counts[expert] += 1
