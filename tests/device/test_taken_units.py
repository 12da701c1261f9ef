"""Units that a rank takes out of memory which others filled: checked, or none is kept."""

import os
from contextlib import contextmanager

import msgspec
import pytest
from oracles import make
from rank_threads import Ranks, alone

from engine_service.core.expert_messages import DropExperts
from engine_service.core.member_messages import Place, TakeUnits, Wanted
from engine_service.device.rank import Rank
from engine_service.device.taking import take_units
from engine_service.errors import ArenaError
from relay_service.core.manifest import Manifest
from relay_service.errors import ManifestError
from relay_service.memory.host import HostArena, create_memfd

PROMPTS = ([3, 1, 4, 1, 5], [9, 8])
EXPERTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a dense layer and two with eight experts each, and shared ones."""
    return make("dots1", tmp_path_factory.mktemp("dots1"), num_key_value_heads=4).folder


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens that one rank makes."""
    return alone(folder, PROMPTS)


def _take(rank, source, pairs):
    """Has a rank take units of another one: pairs of what and where."""
    manifest = source.arena.digested()
    digests = {unit.name: unit.digests for unit in manifest.units}
    wanted = tuple(Wanted(unit, at, digests[unit]) for unit, at in pairs)
    return _take_out_of(rank, source.arena.descriptors[0], TakeUnits(manifest, wanted))


def _take_out_of(rank, fd, command):
    plan = rank.experts._plan
    return take_units(plan, rank.arena, fd, command, lambda *_: None)


def _expert(expert, layer=1):
    return f"layer.{layer}.expert.{expert}"


def _bytes(rank, name):
    (unit,) = [unit for unit in rank.arena.manifest.units if unit.name == name]
    return bytes(rank.arena.view(unit.offset, unit.nbytes))


@pytest.mark.parametrize(
    ("tp", "ep", "weight_format"),
    [
        (1, 3, "plain"),
        (2, 2, "int8"),
        pytest.param(1, 3, "int8", marks=pytest.mark.full),
        pytest.param(2, 2, "plain", marks=pytest.mark.full),
    ],
)
def test_a_rank_joins_in_the_place_of_a_lost_one(folder, tp, ep, weight_format):
    """It takes all that it holds from those that live; tokens and digests are as before."""
    held = {"weight_format": weight_format, "redundant_experts": EXPERTS * (ep - 1)}
    with Ranks(folder, tp, ep, **held) as ranks:
        wanted, digests, experts = ranks.tokens(PROMPTS), ranks.digests(), ranks.map
        ranks.lose(0)
        assert ranks.rejoin("fewer") == [None] * (tp * (ep - 1))
        ranks.place(experts.without([0]))
        ranks.tokens(PROMPTS, 2)
        living = list(ranks.ranks)
        later = []
        for part in range(tp):
            config = msgspec.structs.replace(ranks.starts[part].config, joins_later=True)
            fresh = Rank(msgspec.structs.replace(ranks.starts[part], config=config), ranks._meeting)
            ranks._groups.append(fresh.groups)
            names = [unit.name for unit in fresh.arena.manifest.units]
            total = sum(unit.nbytes for unit in fresh.arena.manifest.units)
            pairs = [(name, name) for name in names]
            assert _take(fresh, living[part], pairs[:5]).bytes_taken < total
            with pytest.raises(ArenaError, match=r"the arena lacks \d+ units"):
                _joined_alone(fresh, experts)
            _take(fresh, living[part], pairs[5:])
            later.append(fresh)
        ranks.ranks = [*later, *living]
        assert ranks.rejoin("whole") == [None] * (tp * ep)
        ranks.place(experts)
        assert all(rank.arena.sealed for rank in ranks.ranks)
        assert ranks.tokens(PROMPTS) == wanted
        assert ranks.digests() == digests


def _joined_alone(rank, experts):
    """What a rank would do that met others without having all that it needs."""
    world, rank.groups.world.ranks = rank.groups.world.ranks, rank._settings.world_size
    try:
        rank.experts.place(Place(experts, rank._settings.rank))
    finally:
        rank.groups.world.ranks = world


@pytest.mark.parametrize("tp", [1, 2])
def test_slots_of_those_left_take_what_was_lost(folder, expected, tp):
    """Kept beside the arena until its place is taken; then it is as if it had lain there ever."""
    with Ranks(folder, tp, 3, redundant_experts=4) as ranks, Ranks(folder, tp, 1) as other:
        ranks.lose(2)
        assert ranks.rejoin("two") == [None] * (2 * tp)
        left = ranks.map.without([2])
        ranks.place(left)
        slots = tuple(map(list, left.layers[1]))
        lost = [e for e in range(EXPERTS) if e not in slots[0] + slots[1]]
        assert len(lost) == 0
        new = left.changed(dict.fromkeys((1, 2), ((0, 1, 6, 7), (4, 5, 2, 3))))
        before = ranks.digests()
        for rank in ranks.ranks:
            source = other.ranks[rank.shard.rank]
            for layer in (1, 2):
                old, now = (m.layers[layer][rank.shard.experts.rank] for m in (left, new))
                pairs = [
                    (_expert(b, layer), _expert(a, layer))
                    for a, b in zip(old, now, strict=True)
                    if a != b
                ]
                _take(rank, source, pairs)
        assert ranks.digests() == before
        ranks.place(new)
        assert ranks.map == new
        assert ranks.tokens(PROMPTS) == expected
        whole = other.digests()
        for rank, found in zip(ranks.ranks, ranks.digests(), strict=True):
            assert found == {name: whole[rank.shard.rank][name] for name in found}


def _copy(data: bytes, generation="tests"):
    """A memory file like an arena's that holds so much."""
    fd = create_memfd("tests", len(data))
    memory = HostArena(fd, len(data), writable=True)
    memory.write_header(generation)
    memory.view(0, len(data))[:] = data
    memory.close()
    return fd


@contextmanager
def _copied(rank, spoiled=-1, data_bytes=None):
    data = bytearray(rank.arena.view(0, rank.arena.manifest.data_bytes))
    if spoiled >= 0:
        data[spoiled] ^= 1
    fd = _copy(bytes(data)[:data_bytes])
    yield fd
    os.close(fd)


@pytest.fixture
def pair(folder):
    """A rank that serves, another one with the same weights, and a fresh one."""
    with Ranks(folder) as ranks, Ranks(folder) as other, Ranks(folder, dummy=True) as fresh:
        yield ranks.ranks[0], other.ranks[0], fresh.ranks[0]


@pytest.mark.parametrize("fresh", [False, True])
def test_none_of_a_command_is_kept_when_one_byte_is_wrong(pair, fresh):
    """The unit is named; a fresh arena is zero there again, and one that serves keeps nothing."""
    serving, other, empty = pair
    rank = empty if fresh else serving
    manifest = other.arena.digested()
    units = {unit.name: unit for unit in manifest.units}
    names = [_expert(0), _expert(1)]
    pairs = (
        [(name, name) for name in names] if fresh else list(zip(names, names[::-1], strict=True))
    )
    wanted = tuple(Wanted(unit, at, units[unit].digests) for unit, at in pairs)
    before = bytes(rank.arena.view(0, manifest.data_bytes))
    with _copied(other, units[names[1]].offset + 7) as fd:
        with pytest.raises(ArenaError, match=r"cannot take layer\.1\.expert\.1: block 0") as caught:
            _take_out_of(rank, fd, TakeUnits(manifest, wanted))
        assert caught.value.details["unit"] == names[1]
    assert bytes(rank.arena.view(0, manifest.data_bytes)) == before
    taken = rank.experts._plan.taken
    assert not taken.landed
    assert taken.of(units[names[1]], names[0], rank.arena.sequence) is None


def test_memory_that_is_none_of_its_manifest(pair):
    """Too short, without a header, or with units that end beyond it: nothing is read."""
    rank, other, _ = pair
    manifest = other.arena.digested()
    (unit,) = [unit for unit in manifest.units if unit.name == _expert(3)]
    wanted = (Wanted(unit.name, unit.name, unit.digests),)
    with _copied(other, data_bytes=manifest.data_bytes - 4096) as fd:
        with pytest.raises(ManifestError, match="manifest needs"):
            _take_out_of(rank, fd, TakeUnits(manifest, wanted))
        short = Manifest(0, manifest.data_bytes - 4096, manifest.units)
        with pytest.raises(ManifestError, match="ends at"):
            _take_out_of(rank, fd, TakeUnits(short, wanted))
    fd = os.memfd_create("tests", os.MFD_ALLOW_SEALING)
    os.truncate(fd, manifest.data_bytes + 4096)
    with pytest.raises(ManifestError):
        _take_out_of(rank, fd, TakeUnits(manifest, wanted))
    os.close(fd)


@pytest.mark.parametrize(
    ("unit", "at", "digests", "words"),
    [
        ("layer.1.expert.9", "layer.1.expert.1", 1, "it isn't there"),
        ("layer.1.expert.1", "layer.1.expert.9", 1, "no unit of this rank"),
        ("layer.1.expert.1", "layer.1.dense", 1, "do not fill"),
        ("layer.1.expert.1", "layer.1.expert.2", 2, "2 digests do not fill"),
    ],
)
def test_units_that_have_no_place(pair, unit, at, digests, words):
    """Refused by name before a byte is copied."""
    rank, other, _ = pair
    command = TakeUnits(other.arena.digested(), (Wanted(unit, at, (b"x" * 16,) * digests),))
    with pytest.raises(ArenaError, match=words) as caught:
        _take_out_of(rank, other.arena.descriptors[0], command)
    assert caught.value.details["unit"] == unit


@pytest.mark.parametrize("gone", ["dropped", "outdated"])
def test_what_was_taken_is_forgotten(pair, gone):
    """When it is dropped, or the arena has changed since."""
    rank, other, _ = pair
    swapped = rank.shard.experts.map.changed({1: ((1, 0, *range(2, EXPERTS)),)})
    _take(rank, other, [(_expert(0), _expert(1)), (_expert(1), _expert(0))])
    if gone == "dropped":
        rank.experts.answer(DropExperts())
    else:
        with rank.arena.committing():
            pass
    with pytest.raises(ArenaError, match="was not taken"):
        rank.experts.place(Place(swapped, 0))
    _take(rank, other, [(_expert(0), _expert(1)), (_expert(1), _expert(0))])
    rank.experts.place(Place(swapped, 0))
    assert _bytes(rank, _expert(0)) == _bytes(other, _expert(0))
    assert _bytes(rank, _expert(1)) == _bytes(other, _expert(1))
