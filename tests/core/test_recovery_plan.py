"""What ranks take, and from whom: what nobody holds is missing, each once, and nothing else is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_expert_placing import shrunk

from engine_service.core.expert_map import ExpertMap
from engine_service.core.expert_placing import fits, regrouped
from engine_service.core.recovery_plan import Holder, awaited, plan
from engine_service.errors import RecoveryFailed
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import Manifest

SIZE = 100


def arena(experts: ExpertMap, rank: int, parts: int, weights: str = "v1") -> Manifest:
    """Lays out what a rank holds as a map says; empty `weights` stand for a dummy's."""
    group, part = divmod(rank, parts)
    units = []
    for layer, rows in experts.layers.items():
        held = [f"layer.{layer}.dense"]
        held += [f"layer.{layer}.expert.{expert}" for expert in rows[group]]
        sizes = [3 * SIZE, *(SIZE + expert for expert in rows[group])]
        units += [
            UnitSpec(name, (TensorSpec(f"{name}.w", DType.U8, (size,)),))
            for name, size in zip(held, sizes, strict=True)
        ]
    layout = lay_out(rank, units)
    if not weights:
        return layout
    called = [block_digest(f"{weights} {u.name} {part}".encode()) for u in layout.units]
    return layout.with_digests(called)


def arenas(experts: ExpertMap, parts: int, weights: str = "v1") -> list[Manifest]:
    """Lays out all ranks."""
    groups = len(next(iter(experts.layers.values())))
    return [arena(experts, rank, parts, weights) for rank in range(groups * parts)]


class Scene:
    """An instance that has lost groups, and the map that it shall have."""

    def __init__(self, whole: ExpertMap, gone: set[int], groups: int, parts: int) -> None:
        self.parts = parts
        self.known = arenas(whole, parts)
        self.left = whole.without(gone)
        self.new = regrouped(self.left, groups)
        self.living = [m for rank, m in enumerate(self.known) if rank // parts not in gone]
        fresh = arenas(self.new, parts, "")[len(self.living) :]
        self.targets = [*self.living, *fresh]
        self.holders = [Holder(n % parts, manifest) for n, manifest in enumerate(self.living)]

    def plan(self, *ended: int):
        """Plans; ranks that ended may be taken from too."""
        more = [Holder(rank % self.parts, self.known[rank]) for rank in ended]
        self.holders = [*self.holders[: len(self.living)], *more]
        return plan(self.new, self.targets, self.holders, self.known, self.parts)

    def missing_at_least(self) -> dict[tuple[int, str], int]:
        """Returns what no holder of a part has, of all that some group shall hold: the minimum."""
        sizes = {u.name: u.nbytes for m in self.known for u in m.units}
        there = {(one.part, unit.name) for one in self.holders for unit in one.manifest.units}
        shall = {
            (part, unit.name)
            for manifest in arenas(self.new, self.parts)
            for unit in manifest.units
            for part in range(self.parts)
        }
        return {key: sizes[key[1]] for key in shall - there}


@given(shrunk(), st.integers(1, 2), st.data())
def test_every_rank_comes_to_hold_what_it_shall(drawn, parts, data):
    """Each unit from one place, once; and what is missing is what nobody holds."""
    whole, gone, left, groups = drawn
    if not fits(left, groups):
        return
    scene = Scene(whole, gone, groups, parts)
    lost = [rank for rank in range(len(scene.known)) if rank // parts in gone]
    ended = [rank for rank in lost if data.draw(st.booleans())]
    made = scene.plan(*ended)
    assert {(m.part, m.unit.name): m.unit.nbytes for m in made.missing} == scene.missing_at_least()
    assert len({(m.part, m.unit.name) for m in made.missing}) == len(made.missing)
    missing = {(m.part, m.unit.name): m.unit.digests for m in made.missing}
    held = [{unit.name: (unit.name, unit.digests) for unit in m.units} for m in scene.targets]
    taken = set()
    for target, source, wanted in made.takes:
        holder = scene.holders[source]
        has = {unit.name: unit.digests for unit in holder.manifest.units}
        assert holder.part == target % parts
        for one in wanted:
            assert has[one.unit] == one.digests
            assert (target, one.at) not in taken
            taken.add((target, one.at))
            held[target][one.at] = one.unit, one.digests
    for target, wanted in made.wanted.items():
        for one in wanted:
            assert missing[target % parts, one.unit] == one.digests
            assert (target, one.at) not in taken
            taken.add((target, one.at))
            held[target][one.at] = one.unit, one.digests
    right = arenas(scene.new, parts)
    for now, before, shall in zip(held, scene.targets, right, strict=True):
        assert [now[u.name] for u in before.units] == [(u.name, u.digests) for u in shall.units]


def four_ranks(redundant: int) -> ExpertMap:
    """Returns 8 experts on 4 ranks, as they lie at the start."""
    return ExpertMap.linear(8, [0, 1], 4, redundant)


@pytest.mark.parametrize(
    ("redundant", "groups", "pulled"),
    [
        (0, 4, ["layer.0.expert.4", "layer.0.expert.5", "layer.1.expert.4", "layer.1.expert.5"]),
        (4, 3, ["layer.0.expert.6", "layer.0.expert.7", "layer.1.expert.6", "layer.1.expert.7"]),
        (4, 4, ["layer.0.expert.6", "layer.0.expert.7", "layer.1.expert.6", "layer.1.expert.7"]),
        (8, 3, []),
        (8, 4, []),
    ],
)
def test_s67_rank_2_of_4_is_lost(redundant, groups, pulled):
    """The pull list is what has no live replica, by name and bytes; nothing where all have one."""
    made = Scene(four_ranks(redundant), {2}, groups, 1).plan()
    assert sorted(one.unit.name for one in made.missing) == pulled
    assert sum(one.unit.nbytes for one in made.missing) == sum(
        SIZE + int(name.rpartition(".")[2]) for name in pulled
    )
    dense = {u.unit for take in made.takes for u in take.wanted if u.unit.endswith("dense")}
    assert dense == ({"layer.0.dense", "layer.1.dense"} if groups == 4 else set())
    takers = {3} if groups == 4 else {0, 1}
    assert set(made.wanted) == (takers if pulled else set())


def test_s67_current_versions_count():
    """After an update a holder of the former version gives nothing, whatever it calls its units."""
    scene = Scene(four_ranks(4), {2}, 3, 1)
    old = arena(four_ranks(4), 2, 1, "v0")
    scene.holders.append(Holder(0, old))
    made = plan(scene.new, scene.targets, scene.holders, scene.known, 1)
    assert len(made.missing) == 4
    assert {one.digests for one in made.wanted[0]} <= {m.unit.digests for m in made.missing}
    assert not {u.digests for u in old.units} & {m.unit.digests for m in made.missing}


def test_a_slot_is_taken_also_where_the_bytes_are_the_same():
    """Two experts may be equal; whoever carries the plan out hears of every slot that changes."""
    whole = ExpertMap(3, {0: ((0, 1), (0, 2))})
    same = (block_digest(b"same"),)
    scene = Scene(whole, {1}, 2, 1)
    known = [
        one.renamed(msgspec.structs.replace(u, digests=same) for u in one.units)
        for one in scene.known
    ]
    new = ExpertMap(3, {0: ((2, 1), (0, 1))})
    made = plan(new, known, [Holder(0, known[0])], known, 1)
    assert [one.unit.name for one in made.missing] == ["layer.0.expert.2"]
    assert [(t.target, [w.at for w in t.wanted]) for t in made.takes] == [(1, ["layer.0.expert.2"])]
    assert [one.at for one in made.wanted[0]] == ["layer.0.expert.0"]


def test_a_mate_that_ended_gives_its_part_alone():
    """Of a group that lost one of two ranks, only that part comes from outside."""
    scene = Scene(four_ranks(0), {2}, 4, 2)
    made = scene.plan(4)
    assert {one.part for one in made.missing} == {1}
    assert len(made.missing) == 4
    assert {take.source for take in made.takes if take.target == 6} > {6}


def test_holders_give_by_turns():
    """What all of them hold, fresh ranks take from each in turn."""
    made = Scene(four_ranks(0), {2}, 5, 1).plan()
    dense = [source for _, source, wanted in made.takes for u in wanted if "dense" in u.unit]
    assert sorted(set(dense)) == [0, 1, 2]
    assert len(dense) == 4


def test_what_nobody_knows():
    """A map of more experts than there were is refused with the unit."""
    scene = Scene(four_ranks(0), {2}, 4, 1)
    with pytest.raises(RecoveryFailed, match=r"layer\.0\.expert\.4, part 0: nobody knows"):
        plan(scene.new, scene.targets, scene.holders, scene.living, 1)
    unverified = [one.without_digests() for one in scene.known]
    with pytest.raises(RecoveryFailed, match=r"layer\.0\.dense, part 0"):
        plan(scene.new, scene.targets, scene.holders, unverified, 1)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_plan_need_not_wait_for_fresh_ranks(parts):
    """What they will say that they hold is known before, so that the plan is the same."""
    whole = ExpertMap(6, {0: ((0, 1, 2), (3, 4, 5)), 2: ((1, 3, 5), (0, 2, 4))})
    scene = Scene(whole, {1}, 2, parts)
    expected, told = scene.plan(), len(scene.living)
    ranks = range(told, len(scene.targets))
    scene.targets[told:] = [awaited(scene.new, scene.known, rank, parts) for rank in ranks]
    assert scene.plan() == expected
    assert expected.missing
