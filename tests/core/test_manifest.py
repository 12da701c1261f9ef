"""Layouts and digests of arenas."""

from itertools import pairwise

import pytest
from fakes import SEAM_BYTES, lay_out_bytes, random_bytes, replace, seam_layout, verified
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.cut import Cut, Part
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, check, lay_out
from relay_service.core.manifest import (
    BLOCK_BYTES,
    TENSOR_ALIGN,
    UNIT_ALIGN,
    Manifest,
    weights_digest,
)
from relay_service.errors import ManifestError


@st.composite
def unit_specs(draw) -> list[UnitSpec]:
    """Any few units of any few tensors, aliases and empty ones among them."""
    units, owners, count = [], [], 0
    for number in range(draw(st.integers(0, 5))):
        tensors = []
        for _ in range(draw(st.integers(0, 4))):
            count += 1
            if owners and draw(st.integers(0, 4)) == 0:
                owner = draw(st.sampled_from(owners))
                tensors.append(replace(owner, name=f"t{count}", alias=owner.name))
                continue
            shape = tuple(draw(st.lists(st.integers(0, 150), max_size=3)))
            spec = TensorSpec(f"t{count}", draw(st.sampled_from(DType)), shape)
            owners.append(spec)
            tensors.append(spec)
        units.append(UnitSpec(f"u{number}", tuple(tensors)))
    return units


@given(unit_specs())
def test_a_layout_is_aligned_and_without_overlaps(specs):
    """Units lie on pages, tensors on cache lines, in order, and none overlaps another."""
    manifest = lay_out(0, specs)
    assert [unit.name for unit in manifest.units] == [spec.name for spec in specs]
    owned = []
    for unit in manifest.units:
        assert unit.offset % UNIT_ALIGN == 0
        for tensor in unit.tensors:
            assert tensor.offset % TENSOR_ALIGN == 0
            if not tensor.alias:
                owned.append((tensor.offset, tensor.offset + tensor.nbytes))
                assert unit.offset <= tensor.offset
                assert tensor.offset + tensor.nbytes <= unit.offset + unit.nbytes
    assert all(left[1] <= right[0] for left, right in pairwise(owned))
    extents = [(u.offset, u.offset + u.nbytes) for u in manifest.units]
    assert all(left[1] <= right[0] for left, right in pairwise(extents))
    assert all(end <= manifest.data_bytes for _, end in extents)


@given(unit_specs())
def test_blocks_cover_every_unit_byte_once(specs):
    """The blocks of a unit are consecutive, full but for its last one, and end where it ends."""
    manifest = lay_out(0, specs)
    blocks = [manifest.block(index) for index in range(manifest.block_count)]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for number, unit in enumerate(manifest.units):
        mine = [block for block in blocks if block.unit == number]
        at = unit.offset
        for block in mine:
            assert block.offset == at
            assert 0 < block.nbytes <= BLOCK_BYTES
            at += block.nbytes
        assert at == unit.offset + unit.nbytes
        assert all(block.nbytes == BLOCK_BYTES for block in mine[:-1])
    assert sum(block.nbytes for block in blocks) == manifest.weight_bytes


@given(unit_specs())
def test_an_alias_has_the_bytes_of_its_owner(specs):
    """An alias lies where its owner lies and takes no bytes of its own."""
    manifest = lay_out(0, specs)
    tensors = {t.name: t for unit in manifest.units for t in unit.tensors}
    aliases = [t for t in tensors.values() if t.alias]
    assert all(t.offset == tensors[t.alias].offset for t in aliases)
    without = [UnitSpec(u.name, tuple(t for t in u.tensors if not t.alias)) for u in specs]
    assert lay_out(0, without).weight_bytes == manifest.weight_bytes


@pytest.mark.parametrize(
    ("nbytes", "sizes"),
    [
        (BLOCK_BYTES - 1, [BLOCK_BYTES - 1]),
        (BLOCK_BYTES, [BLOCK_BYTES]),
        (BLOCK_BYTES + 1, [BLOCK_BYTES, 1]),
        (2 * BLOCK_BYTES + 1, [BLOCK_BYTES, BLOCK_BYTES, 1]),
        (1, [1]),
        (512, [512]),
        (0, []),
    ],
)
def test_block_sizes_at_seams(nbytes, sizes):
    """A unit is cut into full blocks and one shorter one, and an empty one into none."""
    manifest = lay_out_bytes([nbytes])
    assert [manifest.block(i).nbytes for i in range(manifest.block_count)] == sizes


@pytest.mark.parametrize(
    ("shape", "nbytes", "strides"),
    [((), 4, ()), ((0,), 0, (1,)), ((2, 0), 0, (0, 1)), ((1,), 4, (1,)), ((3, 5), 60, (5, 1))],
)
def test_odd_shapes(shape, nbytes, strides):
    """Scalars have one element, shapes with a zero none; both have their place."""
    tensor = lay_out(0, [UnitSpec("u", (TensorSpec("t", DType.F32, shape),))]).units[0].tensors[0]
    assert (tensor.shape, tensor.nbytes, tensor.strides) == (shape, nbytes, strides)


def test_a_strided_tensor_spans_to_its_last_element():
    """The bytes of a strided tensor are those from its first to its last element."""
    spec = TensorSpec("t", DType.F32, (3, 2), strides=(1, 8))
    tensor = lay_out(0, [UnitSpec("u", (spec,))]).units[0].tensors[0]
    assert tensor.nbytes == (2 * 1 + 1 * 8 + 1) * 4


@pytest.mark.parametrize("gib", [2, 4])
def test_tensors_beyond_the_integer_borders(gib):
    """A tensor of more than 2 or 4 GiB is laid out and cut into blocks like any other."""
    nbytes = (gib << 30) + 1
    manifest = lay_out_bytes([3, nbytes, 5])
    last = manifest.block(manifest.block_count - 2)
    assert (last.offset, last.nbytes) == (UNIT_ALIGN + (gib << 30), 1)
    assert manifest.block_count == 1 + gib * 1024 + 1 + 1
    assert manifest.block(manifest.block_count - 1).offset % UNIT_ALIGN == 0


def test_a_name_that_stands_twice_is_refused():
    """Two tensors of one name are refused, by name."""
    twin = TensorSpec("twin", DType.U8, (1,))
    with pytest.raises(ManifestError, match="tensor twin stands twice"):
        lay_out(0, [UnitSpec("a", (twin,)), UnitSpec("b", (twin,))])


def test_an_alias_of_nothing_is_refused():
    """An alias of a tensor that does not come before it is refused, by name."""
    with pytest.raises(ManifestError, match="lost is an alias of unknown nobody"):
        lay_out(0, [UnitSpec("a", (TensorSpec("lost", DType.U8, (1,), alias="nobody"),))])


def test_no_block_beyond_the_last():
    """A block index outside the arena is an `IndexError`, a negative one too."""
    manifest = lay_out_bytes([1, 1])
    for index in (-1, 2):
        with pytest.raises(IndexError):
            manifest.block(index)


def test_digests_round_trip():
    """Digests given by flat index come back by flat index, and can be taken off again."""
    layout = seam_layout()
    digests = [bytes([index]) * 16 for index in range(layout.block_count)]
    manifest = layout.with_digests(digests)
    check(manifest)
    assert [manifest.block_digest(i) for i in range(layout.block_count)] == digests
    assert manifest.verified
    assert not layout.verified
    assert layout.digest == ""
    assert manifest.without_digests() == layout


def test_a_unit_digest_knows_no_place():
    """The same bytes have the same unit digest at another offset, on another rank, by any name."""
    data = random_bytes(lay_out_bytes([SEAM_BYTES[2]]))[: SEAM_BYTES[2]]

    def placed(before: int, rank: int) -> Manifest:
        layout = lay_out_bytes([before, len(data)], rank)
        start = layout.units[1].offset
        content = bytearray(layout.data_bytes)
        content[start : start + len(data)] = data
        return verified(layout, bytes(content))

    here, there = placed(1, 0), placed(70_000, 3)
    assert here.units[1].offset != there.units[1].offset
    assert here.units[1].digest == there.units[1].digest
    assert replace(here.units[1], name="other").digest == here.units[1].digest


@given(st.data())
def test_any_byte_changes_the_weights_digest(data):
    """A flipped bit in any unit of any rank gives another weights digest."""
    layouts = [lay_out_bytes([700, 1, 4097], rank) for rank in range(2)]
    contents = [random_bytes(layout, rank) for rank, layout in enumerate(layouts)]
    rank = data.draw(st.integers(0, 1))
    unit = data.draw(st.sampled_from(layouts[rank].units))
    at = unit.offset + data.draw(st.integers(0, unit.nbytes - 1))
    changed = bytearray(contents[rank])
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    others = [bytes(changed) if r == rank else contents[r] for r in range(2)]
    before, after = (
        weights_digest([verified(m, c) for m, c in zip(layouts, some, strict=True)])
        for some in (contents, others)
    )
    assert before != after


def test_bytes_between_units_do_not_count():
    """Padding is no weight: it changes no digest."""
    layout = lay_out_bytes([10, 10])
    data = bytearray(random_bytes(layout))
    before = verified(layout, bytes(data)).digest
    data[10] ^= 1
    assert verified(layout, bytes(data)).digest == before


def test_no_digest_of_half_the_weights():
    """Without all ranks verified there is no weights digest."""
    layout = lay_out_bytes([10])
    whole = verified(layout, random_bytes(layout))
    assert weights_digest([]) == ""
    assert weights_digest([whole, layout]) == ""
    assert weights_digest([whole]) not in ("", weights_digest([whole, whole]))


def test_a_block_digest_is_canonical_xxh3():
    """The digest of nothing is the one that the xxHash specification gives for XXH3-128."""
    assert block_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_a_block_is_named_by_its_first_tensor():
    """A corrupt block is named after the first tensor with bytes in it, else after its unit."""
    specs = (TensorSpec("a", DType.U8, (BLOCK_BYTES + 1,)), TensorSpec("b", DType.U8, (9,)))
    manifest = lay_out(0, [UnitSpec("u", specs)])
    assert [manifest.tensor_at(0), manifest.tensor_at(1)] == ["a", "a"]
    later = lay_out(0, [UnitSpec("u", (TensorSpec("p", DType.U8, (BLOCK_BYTES,)), specs[1]))])
    assert [later.tensor_at(0), later.tensor_at(1)] == ["p", "b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides": (1, 960)}, "layer.0.qkv: strides (576, 1) and (1, 960)"),
        ({"kind": "buffer"}, "layer.0.qkv: kind parameter and buffer"),
        ({"dtype": DType.F16}, "layer.0.qkv: dtype bf16 and f16"),
        ({"name": "layer.0.kqv"}, "layer.0: seed has layer.0.qkv where target has layer.0.kqv"),
    ],
)
def test_layout_differences_in_words(changes, words):
    """The first tensor that lies otherwise is named with the field that differs."""
    spec = TensorSpec("layer.0.qkv", DType.BF16, (960, 576))
    seed = lay_out(0, [UnitSpec("layer.0", (spec,))])
    target = lay_out(0, [UnitSpec("layer.0", (replace(spec, **changes),))])
    assert seed.layout_difference(target) == words


def test_layout_differences_of_whole_units():
    """Units that are named otherwise, are missing or are longer are told apart."""
    assert lay_out_bytes([1, 2]).layout_difference(lay_out_bytes([1])) == "units: seed 2, target 1"
    assert lay_out_bytes([5]).layout_difference(lay_out_bytes([6])) == "w.0: shape (5,) and (6,)"
    other = lay_out(0, [UnitSpec("other", (TensorSpec("w.0", DType.U8, (1,)),))])
    assert lay_out_bytes([1]).layout_difference(other) == "unit: seed unit.0, target other"
    two = (TensorSpec("w.0", DType.U8, (1,)), TensorSpec("x", DType.U8, (1,)))
    more = lay_out(0, [UnitSpec("unit.0", two)])
    assert lay_out_bytes([1]).layout_difference(more) == "unit.0: seed has 1 tensors, target 2"
    roomy = Manifest(0, 8192, lay_out_bytes([1]).units)
    assert lay_out_bytes([1]).layout_difference(roomy) == "data_bytes: seed 4096, target 8192"
    shorter = replace(more.units[0], nbytes=9999)
    assert "nbytes" in more.layout_difference(Manifest(0, more.data_bytes, (shorter,)))
    assert seam_layout().layout_difference(seam_layout()) == ""


def test_other_parts_are_a_difference():
    """Tensors of one shape that hold other rows, where both say which, aren't the same."""

    def held(*parts: Part, sealed: str = "") -> Manifest:
        cut = Cut(parts, sealed)
        return lay_out(0, [UnitSpec("u", (TensorSpec("m", DType.U8, (4, 3), cut=cut),))])

    upper, lower = (Part("w", (8, 3), (first, 4), (0, 3)) for first in (0, 4))
    words = "m: w: rows 0..3 of 8, columns 0..2 of 3 and w: rows 4..7 of 8, columns 0..2 of 3"
    assert held(upper).layout_difference(held(lower)) == words
    assert held(upper).layout_difference(held(upper)) == ""
    assert held(upper).layout_difference(held()) == held().layout_difference(held(upper)) == ""
    assert held(upper).layout_difference(held(upper, sealed="tiles")) == "m: sealed '' and 'tiles'"
    halves = [Part("w", (8, 3), (first, 2), (0, 3)) for first in (0, 2)]
    more = held(*halves, sealed="tiles").layout_difference(held(halves[0], sealed="tiles"))
    assert more == "m: 2 parts and 1"
