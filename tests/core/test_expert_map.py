"""Which slot holds which expert: every map that is taken is whole, and every move leads there."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_service.core.expert_map import (
    TURNS,
    ExpertMap,
    RankExperts,
    holders,
    moves,
    read_map,
)
from engine_service.errors import ConfigError, InvalidRequest


@st.composite
def placed(draw, experts: int, ranks: int, slots: int):
    """Draws the slots of a layer: every expert somewhere, no rank holds one twice."""
    rest = draw(st.permutations(range(experts)))
    held = [list(rest[rank::ranks]) for rank in range(ranks)]
    for mine in held:
        others = [expert for expert in range(experts) if expert not in mine]
        mine.extend(draw(st.permutations(others))[: slots - len(mine)])
    return tuple(tuple(draw(st.permutations(mine))) for mine in held)


@st.composite
def pairs(draw):
    """Draws two ways to place the experts of a layer."""
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    slots = draw(st.integers(-(-experts // ranks), experts))
    each = [draw(placed(experts, ranks, slots)) for _ in range(2)]
    return experts, *each


@given(pairs())
def test_moves_lead_from_one_map_to_the_other(pair):
    """All read before any writes; what lies right stays, and what a rank has it gives itself."""
    _, old, new = pair
    planned = moves(old, new)
    found = [list(held) for held in old]
    for move in planned:
        assert old[move.source][move.source_slot] == move.expert
        assert (move.source == move.target) or move.expert not in old[move.target]
        found[move.target][move.target_slot] = move.expert
    assert tuple(map(tuple, found)) == new
    differing = sum(
        a != b for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert len(planned) == differing
    assert moves(old, old) == []


@given(pairs(), st.data())
def test_maps_of_those_left(pair, data):
    """They name what was lost; nobody has a turn with that, and one rank has with the others."""
    experts, slots, _ = pair
    gone = data.draw(st.sets(st.sampled_from(range(len(slots)))))
    left = ExpertMap(experts, {0: slots}).without(gone)
    rows = [held for group, held in enumerate(slots) if group not in gone]
    assert left.layers[0] == tuple(rows)
    lost = set(range(experts)) - {expert for held in rows for expert in held}
    assert left.lost == ({0: tuple(sorted(lost))} if lost else {})
    turns = [RankExperts(left, group).turns(0) for group in range(len(rows))]
    for expert in range(experts):
        for turn in range(TURNS):
            serving = [g for g, each in enumerate(turns) if each[expert][turn] >= 0]
            assert len(serving) == (expert not in lost)
            assert all(rows[g][turns[g][expert][turn]] == expert for g in serving)


@given(pairs())
def test_experts_that_nobody_holds_are_not_moved(pair):
    """What a whole map needs of them, no rank could give."""
    experts, slots, _ = pair
    left = ExpertMap(experts, {0: slots}).without([0])
    assume(left.lost and left.layers[0])
    with pytest.raises(InvalidRequest, match="nobody holds"):
        moves(left.layers[0], (slots[0], *left.layers[0][1:]))


@given(pairs())
def test_one_rank_serves_an_expert_at_every_turn(pair):
    """The one that does holds it, and every replica gets a turn, evenly where there are few."""
    experts, slots, _ = pair
    whole = ExpertMap(experts, {3: slots})
    tables = [RankExperts(whole, rank).turns(3) for rank in range(len(slots))]
    for expert, places in holders(slots).items():
        served = {rank: 0 for rank, _ in places}
        for turn in range(TURNS):
            here = [(rank, table[expert][turn]) for rank, table in enumerate(tables)]
            ((rank, slot),) = [(rank, slot) for rank, slot in here if slot >= 0]
            assert slots[rank][slot] == expert
            served[rank] += 1
        assert set(served.values()) == {TURNS // len(places)}


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 12))
def test_a_map_in_a_row_is_whole(experts, ranks, redundant):
    """As far as it can be spread, it is one that would be taken."""
    if (experts + redundant) % ranks or (experts + redundant) // ranks > experts:
        return
    linear = ExpertMap.linear(experts, [1, 4], ranks, redundant)
    assert linear.changed(linear.layers) == linear
    first = [expert for held in linear.layers[4] for expert in held][:experts]
    assert first == list(range(experts))


LINEAR = ExpertMap.linear(4, [0, 2], 2, 2)


def test_everything_that_is_wrong_is_listed():
    """In one error; and the map stays as it was."""
    assert LINEAR.layers[0] == ((0, 1, 2), (3, 0, 1))
    with pytest.raises(InvalidRequest) as refused:
        LINEAR.changed({0: ((0, 0, 9), (1, 2)), 1: ((0, 1, 2), (3, 0, 1)), 2: ((0, 1, -1),)})
    assert refused.value.message.partition(": ")[2].split("; ") == [
        "layer 0, rank 0: expert 0 is there 2 times",
        "layer 0, rank 0: there is no expert 9",
        "layer 0, rank 1: 2 slots, 3 are needed",
        "layer 0: nobody holds 3",
        "layer 1 has no experts",
        "layer 2: 1 ranks, 2 are needed",
        "layer 2, rank 0: there is no expert -1",
        "layer 2: nobody holds 2, 3",
    ]


def test_a_long_list_is_cut_short():
    """A map of another model is wrong in every layer."""
    with pytest.raises(InvalidRequest, match=r"; and 10 more$"):
        LINEAR.changed(dict.fromkeys(range(3, 33), ()))


def test_layers_that_are_not_named_stay():
    """And the map has another name."""
    changed = LINEAR.changed({2: ((0, 1, 2), (2, 3, 0))})
    assert changed.layers == {0: LINEAR.layers[0], 2: ((0, 1, 2), (2, 3, 0))}
    assert changed.digest != LINEAR.digest
    assert changed.changed({2: LINEAR.layers[2]}).digest == LINEAR.digest


def test_a_rank_gives_in_turn():
    """Of several that hold an expert, the one that has given least."""
    old = ((0, 1), (0, 1), (2, 3))
    planned = moves(old, ((0, 1), (2, 3), (0, 1)))
    assert sorted(move.source for move in planned if move.target == 2) == [0, 1]


def test_a_map_file(tmp_path):
    """What it says beside the layers is left; what it cannot mean is named."""
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"layers": {"2": [[0, 1, 2], [3, 0, 1]]}, "epoch": 3}))
    assert read_map(file) == {2: LINEAR.layers[2]}
    file.write_text('{"layers": {"2": [[0, "one"]]}}')
    with pytest.raises(ConfigError, match=r"map\.json: Expected `int`, got `str`"):
        read_map(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_map(tmp_path / "none.json")
