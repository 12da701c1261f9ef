"""Two listings of what lies in arenas → what differs: named exactly, or as one of several."""

import msgspec
import pytest
from fakes import lay_out_bytes, replace, verified
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core import comparing
from engine_service.core.check_messages import FoundWeights
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES, Manifest

SIZES = (1, 63, 64, 65, 4096, BLOCK_BYTES - 64, BLOCK_BYTES, BLOCK_BYTES + 1)


def _listed(layout: Manifest, data: bytes) -> FoundWeights:
    entries = comparing.entries(layout)
    digests = tuple(block_digest(data[e.offset : e.offset + e.nbytes]) for e in entries)
    return FoundWeights(manifest=verified(layout, data), tensors=digests, address=0)


def _flipped(data: bytes, *places: int) -> bytes:
    changed = bytearray(data)
    for place in places:
        changed[place] ^= 1
    return bytes(changed)


def _named(differences) -> list[tuple[int, str, int, str]]:
    return [(one.rank, one.tensor, one.block, one.what) for one in differences]


@st.composite
def arenas(draw) -> tuple[Manifest, list[int]]:
    """A layout of small and large tensors, and places within its units."""
    sizes = draw(st.lists(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), max_size=3))
    units = [
        UnitSpec(
            f"unit.{u}",
            tuple(TensorSpec(f"{u}.{t}", DType.U8, (n,)) for t, n in enumerate(each)),
        )
        for u, each in enumerate(sizes)
    ]
    layout = lay_out(1, units)
    held = [p for unit in layout.units for p in (unit.offset, unit.offset + unit.nbytes - 1)]
    inside = st.sampled_from(layout.units).flatmap(
        lambda unit: st.integers(unit.offset, unit.offset + unit.nbytes - 1)
    )
    places = draw(st.lists(inside | st.sampled_from(held), max_size=4, unique=True)) if held else []
    return layout, places


@settings(max_examples=60, deadline=None)
@given(arenas())
def test_what_differs_is_named_and_nothing_else(arena):
    """With digests of tensors exactly; with those of blocks alone at least, in the right block."""
    layout, places = arena
    data = bytes(layout.data_bytes)
    was, now = _listed(layout, data), _listed(layout, _flipped(data, *places))
    entries = comparing.entries(layout)
    touched = {e.name for e in entries if any(e.offset <= p < e.offset + e.nbytes for p in places)}
    between = [p for p in places if not any(e.offset <= p < e.offset + e.nbytes for e in entries)]
    exact = list(comparing.with_snapshot(was, now))
    assert {one.tensor for one in exact} - {""} == touched
    assert bool(exact) == bool(places)
    for one in exact:
        assert one.rank == 1
        block = layout.block(one.block)
        ends = block.offset + block.nbytes
        assert any(block.offset <= p < ends for p in places)
        assert not one.tensor or any(
            e.name == one.tensor and e.offset < ends and block.offset < e.offset + e.nbytes
            for e in entries
        )
    rough = list(comparing.with_manifest(was.manifest, now))
    assert {one.tensor for one in rough} >= touched
    hit = {index for p in places for index in layout.blocks_at(p, 1)}
    assert {one.block for one in rough} <= hit
    assert bool(rough) == bool(places)
    certain = {one.tensor for one in rough if one.what == "contents"}
    if not between:
        assert certain <= touched


def test_a_byte_between_tensors():
    """Is told of its block and its unit; no tensor is blamed for it."""
    layout = lay_out(0, [UnitSpec("u", tuple(TensorSpec(n, DType.U8, (8,)) for n in "ab"))])
    data = bytes(layout.data_bytes)
    was, now = _listed(layout, data), _listed(layout, _flipped(data, 20))
    (one,) = comparing.with_snapshot(was, now)
    assert (one.tensor, one.block, one.what) == ("", 0, "contents, between the tensors of u")
    assert {one.expected, one.found} == {
        m.manifest.block_digest(0).hex() for m in (was, now)
    }  # fmt: skip


def test_a_tensor_that_shares_its_block_is_suspected():
    """Digests of blocks cannot tell it from its neighbours, and that is said."""
    small = tuple(TensorSpec(n, DType.U8, (8,)) for n in "abc")
    layout = lay_out(0, [UnitSpec("u", (*small, TensorSpec("large", DType.U8, (BLOCK_BYTES,))))])
    data = bytes(layout.data_bytes)
    large = comparing.entries(layout)[-1]
    now = _listed(layout, _flipped(data, 64, large.offset + large.nbytes - 1))
    suspected = "contents, or those of 3 more in its block"
    expected = _listed(layout, data)
    assert _named(comparing.with_manifest(expected.manifest, now)) == [
        (0, "a", 0, suspected), (0, "b", 0, suspected), (0, "c", 0, suspected),
        (0, "large", 1, "contents"),
    ]  # fmt: skip
    known = comparing.tensor_digests(expected)
    assert _named(comparing.with_manifest(expected.manifest, now, known)) == [
        (0, "b", 0, "contents"), (0, "large", 1, "contents"),
    ]  # fmt: skip


def test_an_alias_is_not_blamed_beside_its_owner():
    """They are one storage, and one difference, in the same unit and in another."""
    own = (TensorSpec("own", DType.U8, (9,)), TensorSpec("near", DType.U8, (9,), alias="own"))
    far = (TensorSpec("far", DType.U8, (9,), alias="own"), TensorSpec("last", DType.U8, (9,)))
    layout = lay_out(0, [UnitSpec("u", own), UnitSpec("v", far)])
    data = bytes(layout.data_bytes)
    was, now = _listed(layout, data), _listed(layout, _flipped(data, 3))
    expected = [(0, "own", 0, "contents")]
    assert _named(comparing.with_snapshot(was, now)) == expected
    assert _named(comparing.with_manifest(was.manifest, now)) == expected
    data = _flipped(data, layout.units[1].offset)
    assert _named(comparing.with_snapshot(was, _listed(layout, data))) == [
        (0, "last", 1, "contents")
    ]


def test_two_equal_sized_tensors_that_were_swapped():
    """Both are named."""
    layout = lay_out_bytes([40, 40, 8])
    data = bytearray(layout.data_bytes)
    first, second = (e.offset for e in comparing.entries(layout)[:2])
    data[first : first + 40], data[second : second + 40] = b"a" * 40, b"b" * 40
    swapped = bytearray(data)
    swapped[first : first + 40], swapped[second : second + 40] = b"b" * 40, b"a" * 40
    found = comparing.with_snapshot(_listed(layout, data), _listed(layout, swapped))
    assert [one.tensor for one in found] == ["w.0", "w.1"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dtype": DType.I8}, [("w.1", "dtype i8, was u8")]),
        ({"shape": (4, 2), "strides": (2, 1)}, [("w.1", "shape (4, 2), was (8,)")]),
        ({"kind": "buffer"}, [("w.1", "kind buffer, was parameter")]),
        ({"name": "other"}, [("w.1", "gone"), ("other", "added")]),
    ],
)
def test_what_a_tensor_is_counts_too(changed, expected):
    """Though its bytes are the same; and what lies beside it is still compared."""
    layout = lay_out_bytes([8, 8, 8])
    data = bytes(layout.data_bytes)
    was = _listed(layout, data)
    unit = layout.units[1]
    other = replace(unit, tensors=(replace(unit.tensors[0], **changed),))
    anew = Manifest(0, layout.data_bytes, (layout.units[0], other, layout.units[2]))
    now = _listed(anew, _flipped(data, layout.units[2].offset))
    found = [(one.tensor, one.what) for one in comparing.with_snapshot(was, now)]
    assert found == [*expected, ("w.2", "contents")]
    (first,) = comparing.with_manifest(was.manifest, now)
    assert first.what.startswith("layout: ")
    assert next(o.block for o in comparing.with_snapshot(was, now) if o.tensor == "w.2") == 2


def _ranks(*held: str, flip: tuple[int, str] = (-1, "")) -> list[FoundWeights]:
    """Ranks that hold experts by one letter each, whose bytes depend on the letter alone."""
    found = []
    for rank, letters in enumerate(held):
        names = [f"layer.1.expert.{ord(letter) - 97}" for letter in letters]
        tensors = [(TensorSpec(f"{n}.up", DType.U8, (70,)), TensorSpec(f"{n}.down", DType.U8, (9,)))
                   for n in names]  # fmt: skip
        layout = lay_out(rank, [UnitSpec(n, t) for n, t in zip(names, tensors, strict=True)])
        data = bytearray(layout.data_bytes)
        for letter, unit in zip(letters, layout.units, strict=True):
            for entry in unit.tensors:
                data[entry.offset : entry.offset + entry.nbytes] = letter.encode() * entry.nbytes
            if flip == (rank, letter):
                data[unit.tensors[1].offset] ^= 1
        found.append(_listed(layout, bytes(data)))
    return found


def test_replicas_are_compared_with_each_other():
    """Wherever they lie; the one that differs from the first is named, with whom it differs."""
    assert list(comparing.replicas(_ranks("abc", "cda"), 1)) == []
    found = _named(comparing.replicas(_ranks("abc", "cda", flip=(1, "c")), 1))
    assert found == [(1, "layer.1.expert.2.down", 0, "replica of expert 2 on rank 0")]
    # Ranks of one group hold different parts of the same experts.
    assert list(comparing.replicas(_ranks("ab", "ab", flip=(1, "a")), 2)) == []
    (one,) = comparing.replicas(_ranks("a", "b", "x", "b", flip=(3, "b")), 2)
    assert (one.rank, one.what) == (3, "replica of expert 1 on rank 1")


def _units(found: list[FoundWeights], parts: int = 1) -> dict:
    return {
        (rank % parts, unit.name): unit
        for rank, one in enumerate(found)
        for unit in one.manifest.units
    }


def test_another_instance_may_hold_experts_elsewhere():
    """They are compared by what they are called; what only one side holds is named."""
    here, there = _ranks("ab", "cd", flip=(1, "c")), _ranks("dc", "ba")
    assert _named(comparing.with_units(_units(there), here, 1)) == [
        (1, "layer.1.expert.2.up", 0, "contents, or those of 1 more in its block"),
        (1, "layer.1.expert.2.down", 0, "contents, or those of 1 more in its block"),
    ]
    lacks = _named(comparing.with_units(_units(_ranks("abe")), _ranks("abc"), 1))
    assert lacks == [
        (0, "layer.1.expert.2", -1, "a unit that is only here"),
        (0, "layer.1.expert.4", -1, "a unit that is only there"),
    ]


def test_a_unit_that_is_laid_out_otherwise():
    """Nothing is said of its contents, however many blocks it has."""
    here = [_listed(lay_out_bytes([BLOCK_BYTES + 8]), bytes(2 * BLOCK_BYTES))]
    for sizes in ([8], [3 * BLOCK_BYTES]):
        layout = lay_out_bytes(sizes)
        there = [_listed(layout, bytes(layout.data_bytes))]
        (one,) = comparing.with_units(_units(there), here, 1)
        assert (one.tensor, one.what) == ("w.0", "contents: laid out otherwise")


def test_addresses_stay():
    """Of the arena, and of each tensor as a pass reads it."""
    layout = lay_out_bytes([8, 8])
    found = msgspec.structs.replace(_listed(layout, bytes(layout.data_bytes)), address=4096)
    assert list(comparing.misplaced(found, 4096)) == []
    moved = msgspec.structs.replace(found, misplaced=("w.1",))
    arena, tensor = comparing.misplaced(moved, 8192)
    assert (arena.tensor, arena.what, arena.expected) == ("", "address of the arena", "0x2000")
    assert (tensor.tensor, tensor.what, tensor.expected) == ("w.1", "address", "0x2000")
