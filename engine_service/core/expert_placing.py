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
    living, slots, fresh = [list(row) for row in rows], len(rows[0]), groups - len(rows)
    counts = Counter(expert for row in living for expert in row)
    lost = [expert for expert in range(experts) if not counts[expert]]
    room = slots * fresh
    given = Counter(lost[:room])
    _replace_replicas(living, counts, lost[room:])
    while given.total() < room:
        fewest = (one for one in range(experts) if given[one] < fresh)
        given[min(fewest, key=lambda one: counts[one] + given[one])] += 1
    # Dealt out by turns, none comes to a group twice: it has no more slots than there are groups.
    dealt = list(given.elements())
    return tuple(map(tuple, (*living, *(dealt[n::fresh] for n in range(fresh)))))


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
