"""Experts on other groups than before: none is lost, and as few slots change as can be."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_expert_map import placed

from engine_service.core.expert_map import ExpertMap
from engine_service.core.expert_placing import fits, regrouped
from engine_service.errors import InvalidRequest


@st.composite
def shrunk(draw):
    """Draws a map of which some groups are gone, and how many groups there shall be."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    slots = draw(st.integers(-(-experts // ranks), experts))
    whole = ExpertMap(experts, {n: draw(placed(experts, ranks, slots)) for n in (1, 3)})
    gone = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    left = whole.without(gone)
    return whole, gone, left, draw(st.integers(ranks - len(gone), ranks + 2))


@given(shrunk())
def test_what_is_left_and_what_is_lost(drawn):
    """Rows stay in order, and an expert is lost where none of them holds it."""
    whole, gone, left, _ = drawn
    for layer, rows in whole.layers.items():
        assert left.layers[layer] == tuple(row for n, row in enumerate(rows) if n not in gone)
        there = {expert for row in left.layers[layer] for expert in row}
        assert set(left.lost.get(layer, ())) == set(range(whole.experts)) - there
    assert () not in left.lost.values()
    assert not whole.lost


@given(shrunk())
def test_every_expert_has_a_slot_again(drawn):
    """Wherever slots suffice: in rows of the same size, none of which holds one twice."""
    _, _, left, groups = drawn
    slots = len(left.layers[1][0])
    assert fits(left, groups) == (groups * slots >= left.experts)
    if not fits(left, groups):
        with pytest.raises(InvalidRequest, match=f"{groups} groups of {slots} slots cannot hold"):
            regrouped(left, groups)
        return
    new = regrouped(left, groups)
    assert not new.lost
    assert new == regrouped(left, groups)
    for rows in new.layers.values():
        assert len(rows) == groups
        for row in rows:
            assert len(row) == len(set(row)) == slots


@given(shrunk())
def test_no_slot_changes_without_need(drawn):
    """Groups that live get just those lost experts for which fresh ones have no slot.

    Each in the place of a replica; and nothing that is held twice is held once for a replica.
    """
    _, _, left, groups = drawn
    if not fits(left, groups):
        return
    new = regrouped(left, groups)
    for layer, rows in left.layers.items():
        slots, lost = len(rows[0]), left.lost.get(layer, ())
        pairs = [
            (was, now)
            for before, after in zip(rows, new.layers[layer], strict=False)
            for was, now in zip(before, after, strict=True)
            if was != now
        ]
        assert len(pairs) == max(0, len(lost) - slots * (groups - len(rows)))
        assert {now for _, now in pairs} <= set(lost)
        counts = Counter(expert for row in rows for expert in row)
        counts.subtract(was for was, _ in pairs)
        assert all(counts[was] >= 1 for was, _ in pairs)


@given(shrunk())
def test_replicas_are_spread(drawn):
    """Slots of fresh groups that are left go to what has fewest: replicas differ by one at most.

    That is among what only fresh groups hold; whoever lives keeps what it has.
    """
    _, _, left, groups = drawn
    if not fits(left, groups):
        return
    for layer, rows in regrouped(left, groups).layers.items():
        fresh = rows[len(left.layers[layer]) :]
        counts = Counter(expert for row in rows for expert in row)
        for row in fresh:
            for expert in set(range(left.experts)) - set(row):
                extra = [one for one in row if one not in left.lost.get(layer, ())]
                assert all(counts[one] <= counts[expert] + 1 for one in extra)


def test_a_replica_gives_way_by_turns():
    """The one of which there are most; then that of whom less was asked."""
    left = ExpertMap(8, {0: ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 2, 5))})
    assert left.lost == {0: (6, 7)}
    assert regrouped(left, 3).layers[0] == ((6, 1, 2, 3), (0, 7, 4, 5), (0, 1, 2, 5))


def test_a_fresh_group_takes_what_was_lost_and_then_replicas():
    """And whoever lives stays as it is."""
    left = ExpertMap(4, {0: ((0, 1, 2),), 2: ((3, 1, 2),)})
    assert regrouped(left, 2).layers == {
        0: ((0, 1, 2), (3, 0, 1)), 2: ((3, 1, 2), (0, 1, 2)),
    }  # fmt: skip


def test_what_cannot_be():
    """Is refused with the numbers, as are fewer groups than live."""
    two = ExpertMap.linear(4, [0, 5], 2)
    with pytest.raises(InvalidRequest, match="layer 0: 1 groups of 2 slots cannot hold 4 experts"):
        regrouped(two.without([1]), 1)
    with pytest.raises(InvalidRequest, match="layer 0: 1 groups of 2 slots, and 2 groups live"):
        regrouped(two, 1)
    narrow = ExpertMap(1, {0: ((0, 0),)})
    with pytest.raises(InvalidRequest, match="one would be in a group twice") as refused:
        regrouped(narrow, 2)
    assert refused.value.details == {"field": "expert_parallel_size", "found": "2"}
