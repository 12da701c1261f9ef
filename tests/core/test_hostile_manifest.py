"""Manifests that a peer could send to hurt us."""

import pytest
from fakes import random_bytes, replace, seam_layout, verified
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core import layout
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.holder import Holder
from relay_service.core.layout import TensorSpec, UnitSpec, check, lay_out
from relay_service.core.manifest import Manifest, TensorEntry, Unit
from relay_service.core.planner import Planner
from relay_service.errors import ManifestError, RelayError

HUGE = 1 << 63
LAYOUT = lay_out(
    0,
    [
        UnitSpec(
            "first",
            (
                TensorSpec("a", DType.F32, (4, 4)),
                TensorSpec("b", DType.BF16, (8,), kind="buffer"),
                TensorSpec("c", DType.F32, (4, 4), alias="a"),
            ),
        ),
        UnitSpec("second", (TensorSpec("d", DType.U8, (5000,)),)),
    ],
)
PART = Part("w", (4, 4), (0, 1), (0, 4))
MANIFEST = verified(LAYOUT, random_bytes(LAYOUT))


def with_unit(number: int, **changes) -> Manifest:
    """Returns the good manifest with one unit changed."""
    units = list(MANIFEST.units)
    units[number] = replace(units[number], **changes)
    return Manifest(MANIFEST.rank, MANIFEST.data_bytes, tuple(units))


def with_tensor(number: int, **changes) -> Manifest:
    """Returns the good manifest with one tensor of its first unit changed."""
    tensors = list(MANIFEST.units[0].tensors)
    tensors[number] = replace(tensors[number], **changes)
    return with_unit(0, tensors=tuple(tensors))


def test_the_good_one_passes():
    """What the other tests change is refused for the change alone."""
    check(MANIFEST)
    check(verified(seam_layout(), random_bytes(seam_layout())))


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (Manifest(0, -1, ()), "data_bytes -1"),
        (Manifest(0, HUGE, ()), "data_bytes"),
        (Manifest(0, 4096, MANIFEST.units), "unit second: ends at"),
        (with_unit(0, offset=-4096), "unit first: offset -4096"),
        (with_unit(0, offset=64), "unit first: offset 64 overlaps or is unaligned"),
        (with_unit(1, offset=0), "unit second: offset 0 overlaps"),
        (with_unit(0, nbytes=-1), "unit first"),
        (with_unit(0, nbytes=HUGE), "unit first: ends at"),
        (with_unit(0, nbytes=10), "unit first|leaves first"),
        (with_unit(0, name=""), "unit name"),
        (with_unit(0, name="../etc/passwd"), "unit name"),
        (with_unit(0, name="second"), "unit second stands twice"),
        (with_unit(0, name="x" * 10_000), "unit name 'x+' is not allowed"),
        (with_unit(0, name="line\nbreak"), "unit name"),
        (with_unit(0, digests=MANIFEST.units[0].digests * 2), "2 digests for 1 blocks"),
        (with_unit(0, digests=(b"short",)), "a digest is not 16 bytes long"),
        (with_unit(0, digests=(b"",)), "a digest is not 16 bytes long"),
        (with_unit(0, digests=(bytes(17),)), "a digest is not 16 bytes long"),
        (with_tensor(0, name="d"), "tensor d stands twice"),
        (with_tensor(0, name="\x00"), "tensor name"),
        (with_tensor(0, name="a/b"), "tensor name"),
        (with_tensor(0, name="a\u202eb"), "tensor name"),
        (with_tensor(0, kind="weight"), "tensor a: unknown kind 'weight'"),
        (with_tensor(0, offset=-64), "tensor a: a size is out of range"),
        (with_tensor(0, offset=4096), "tensor a: extent overlaps or leaves first"),
        (with_tensor(1, offset=0), "tensor b: extent overlaps or leaves first"),
        (with_tensor(0, nbytes=1 << 40), "tensor a: 1099511627776 bytes, shape needs 64"),
        (with_tensor(0, nbytes=0), "tensor a: 0 bytes, shape needs 64"),
        (with_tensor(0, shape=(4, -4)), "tensor a: a size is out of range"),
        (with_tensor(0, shape=(HUGE, HUGE)), "tensor a: a size is out of range"),
        (with_tensor(0, shape=(4,)), "tensor a: 1 dimensions"),
        (with_tensor(0, shape=(1,) * 1000, strides=(1,) * 1000), "tensor a: 1000 dimensions"),
        (with_tensor(0, strides=(4, -1)), "tensor a: a size is out of range"),
        (with_tensor(0, strides=(1 << 43, 1 << 43)), "tensor a: 64 bytes, shape needs"),
        (with_tensor(0, strides=()), "tensor a: 2 dimensions"),
        (with_tensor(0, dtype=DType.F64), "tensor a: 64 bytes, shape needs 128"),
        (with_tensor(2, alias="nobody"), "tensor c: not within 'nobody'"),
        (with_tensor(2, alias="c"), "tensor c: not within 'c'"),
        (with_tensor(2, alias="b"), "tensor c: not within 'b'"),
        (with_tensor(2, offset=4096), "tensor c: not within 'a'"),
        (with_tensor(0, alias="c"), "tensor a: not within 'c'"),
        (with_tensor(0, cut=Cut((PART,) * 5)), "tensor a: its parts are not its 4 rows"),
        (with_tensor(0, cut=Cut((replace(PART, rows=(3, 2)),) * 2)), "'w' has no rows"),
        (with_tensor(0, cut=Cut((replace(PART, whole=(HUGE, 4)),) * 4)), "'w' has no rows"),
        (with_tensor(0, cut=Cut((PART,) * 2000)), "tensor a: more than 1024 parts"),
        (with_tensor(0, cut=Cut((replace(PART, logical="w" * 9999),) * 4)), "is not allowed"),
        (with_tensor(0, cut=Cut((PART,) * 4, "s" * 9999)), "is not allowed"),
        (with_tensor(0, cut=Cut((PART,) * 4, "line\nbreak")), "is not allowed"),
    ],
)
def test_a_contradiction_is_refused_by_name(manifest, words):
    """A manifest that contradicts itself is refused, and the message says where."""
    with pytest.raises(ManifestError, match=words):
        check(manifest)


def test_huge_counts_are_refused(monkeypatch):
    """More units or tensors than anybody needs are refused before they are looked at."""
    monkeypatch.setattr(layout, "MAX_UNITS", 1)
    with pytest.raises(ManifestError, match="2 units, at most 1 are allowed"):
        check(MANIFEST)
    monkeypatch.setattr(layout, "MAX_UNITS", 2)
    monkeypatch.setattr(layout, "MAX_TENSORS", 3)
    with pytest.raises(ManifestError, match="more than 3 tensors"):
        check(MANIFEST)
    monkeypatch.setattr(layout, "MAX_TENSORS", 4)
    monkeypatch.setattr(layout, "MAX_ALL_PARTS", 4)
    parts = with_tensor(0, cut=Cut((PART,) * 4))
    check(parts)
    monkeypatch.setattr(layout, "MAX_ALL_PARTS", 3)
    with pytest.raises(ManifestError, match="more than 3 parts of tensors"):
        check(parts)


@pytest.mark.parametrize(
    "manifest",
    [
        with_tensor(0, cut=Cut((replace(PART, logical="w" * 100_000),) * 4)),
        with_tensor(0, cut=Cut((PART,) * 4, "s" * 100_000)),
        with_unit(0, name="u" * 100_000),
        with_tensor(0, name="t" * 100_000),
        with_tensor(0, kind="k" * 100_000),
        with_tensor(2, alias="a" * 100_000),
    ],
)
def test_a_refusal_is_short_and_printable(manifest):
    """A peer's long names do not come back in our messages."""
    with pytest.raises(ManifestError) as refused:
        check(manifest)
    assert len(str(refused.value)) < 1000


integers = st.one_of(
    st.integers(-2, 5000), st.sampled_from([4096, 8192, 1 << 31, 1 << 44, HUGE, -HUGE])
)
words = st.one_of(st.text(max_size=4), st.sampled_from(["a", "b", "d", "first", "parameter"]))
few = st.lists(integers, max_size=3).map(tuple)
two = st.tuples(integers, integers)
cuts = st.builds(Cut, st.lists(st.builds(Part, words, two, two, two), max_size=3).map(tuple), words)
TENSOR_FIELDS = {
    "name": words, "kind": words, "dtype": st.sampled_from(DType), "shape": few, "strides": few,
    "offset": integers, "nbytes": integers, "alias": words, "logical": words, "cut": cuts,
}  # fmt: skip
UNIT_FIELDS = {
    "name": words, "offset": integers, "nbytes": integers,
    "digests": st.lists(st.binary(max_size=17), max_size=3).map(tuple),
}  # fmt: skip


@st.composite
def mutated(draw) -> Manifest:
    """The good manifest with one field of it replaced by anything of its type."""
    match draw(st.sampled_from(["data_bytes", "unit", "tensor"])):
        case "data_bytes":
            return Manifest(0, draw(integers), MANIFEST.units)
        case "unit":
            field = draw(st.sampled_from(sorted(UNIT_FIELDS)))
            return with_unit(draw(st.integers(0, 1)), **{field: draw(UNIT_FIELDS[field])})
        case _:
            field = draw(st.sampled_from(sorted(TENSOR_FIELDS)))
            return with_tensor(draw(st.integers(0, 2)), **{field: draw(TENSOR_FIELDS[field])})


@given(mutated())
def test_any_one_change_is_refused_or_harmless(manifest):
    """Whatever one field says, the manifest is refused or still stays within its arena."""
    try:
        check(manifest)
    except ManifestError:
        return
    for unit in manifest.units:
        _assert_inside(unit, manifest.data_bytes)
        for tensor in unit.tensors:
            _assert_inside(tensor, manifest.data_bytes)
    for index in range(manifest.block_count):
        _assert_inside(manifest.block(index), manifest.data_bytes)


def _assert_inside(extent: Unit | TensorEntry, data_bytes: int) -> None:
    assert 0 <= extent.offset <= extent.offset + extent.nbytes <= data_bytes


cells = st.integers(0, 5)
runs = st.tuples(cells, cells)
odd_parts = st.builds(Part, st.sampled_from("vw"), st.just((4, 4)), runs, runs)
odd_cuts = st.builds(
    Cut, st.lists(odd_parts, max_size=4).map(tuple), st.sampled_from(["", "", "tiles"])
)
GOOD_CUT = Cut((Part("w", (4, 4), (0, 2), (0, 4)), Part("v", (4, 4), (1, 2), (0, 4))))


@given(st.lists(odd_cuts, min_size=1, max_size=3))
def test_no_plan_leaves_a_unit_of_its_source(cuts):
    """Whatever a source says that it holds, what is taken of it lies in one of its units."""
    tensors = [TensorSpec(f"t{n}", DType.F32, (4, 4), cut=cut) for n, cut in enumerate(cuts)]
    target = lay_out(0, [UnitSpec("u", (TensorSpec("m", DType.F32, (4, 4), cut=GOOD_CUT),))])
    try:
        source = lay_out(0, [UnitSpec(f"unit.{one.name}", (one,)) for one in tensors])
        plan = Planner([Holder("source", source)]).plan(Holder("target", target))
    except RelayError:
        return
    assert sum(copy.total_bytes for copy in plan) == 64
    for copy in plan:
        end = copy.source_offset + copy.source_span
        assert any(
            unit.offset <= copy.source_offset and end <= unit.offset + unit.nbytes
            for unit in source.units
        )
