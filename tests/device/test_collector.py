"""Pieces of checkpoint tensors become the same arena in any order, and of any size."""

import random
import resource
from contextlib import contextmanager

import pytest
import torch
from format_cases import packs, rounds
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_fp8_checkpoints import write_float8
from tiny_llama import Filling, write_checkpoint

from engine_service.device.collector import Collector
from engine_service.device.torch_dtypes import bytes_of
from engine_service.errors import CheckpointError, ResourceExhausted

NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
CASES = {
    "plain": ("plain", torch.float32, {}, 0),
    "converted": ("plain", torch.float64, {}, 0),
    "packed": ("packed", torch.bfloat16, {"tie_word_embeddings": True}, 0),
    "int8, second of two": ("int8", torch.float32, {}, 1),
    "int4, second of two": ("int4", torch.bfloat16, {"tie_word_embeddings": False}, 1),
    "fp8": ("fp8", torch.float32, {}, 0),
    "float8 blocks": ("fp8", torch.float8_e4m3fn, {}, 0),
    "float8 blocks read": ("plain", torch.float8_e4m3fn, {}, 0),
}  # fmt: skip
MARKS = {"packed": packs, "int8, second of two": rounds}


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=MARKS.get(case, ())) for case in CASES]
)
def filling(request, tmp_path_factory) -> Filling:
    """A checkpoint, the arena that it fills, and what an ordered load makes of it."""
    name, stored, changes, rank = CASES[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    if stored is torch.float8_e4m3fn:
        write_float8(folder, num_hidden_layers=2)
    else:
        write_checkpoint(folder, dtype=stored, num_hidden_layers=2, **changes)
    served = "bfloat16" if name == "packed" else "float32"
    return Filling(folder, name, served, rank, ranks=1 + rank)


@pytest.fixture
def plain(tmp_path) -> Filling:
    """A checkpoint whose bytes go straight to their place."""
    return Filling(write_checkpoint(tmp_path), "plain", "float32")


@pytest.fixture
def waiting(tmp_path) -> Filling:
    """A checkpoint whose matrices wait until they are complete."""
    return Filling(write_checkpoint(tmp_path), "fp8", "float32")


def _pieces(tensors, cuts):
    """Cuts tensors: yields name, first element and bytes; `cuts` chooses how long each is."""
    for name, tensor in tensors.items():
        raw, first = bytes_of(tensor), 0
        while first < tensor.numel():
            count = min(cuts(name, tensor.numel()), tensor.numel() - first)
            yield name, first, raw[first * tensor.itemsize :][: count * tensor.itemsize]
            first += count


def _collected(filling, pieces, **options):
    """Returns the manifest of a fresh arena, and the collector that filled it."""
    arena, parts, processed, computed = filling.fresh()
    with Collector(arena, parts, processed, **options) as collector:
        for name, first, data in pieces:
            collector.add(name, first, data)
        manifest = collector.finish(computed)
    assert arena.digested() == manifest
    return manifest, collector


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 2**32), pieces_each=st.sampled_from([1, 3, 30]),
    most=st.sampled_from([0, 40_000, 1 << 30, None]),
)  # fmt: skip
def test_any_order_and_any_cut_fills_the_same_arena(filling, seed, pieces_each, most):
    """Digests are those of the ordered load, and no more waits in memory than may."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    tensors = load_file(filling.file)
    pieces = list(_pieces(tensors, lambda _, n: chance.randint(1, 1 + 2 * n // pieces_each)))
    chance.shuffle(pieces)
    manifest, collector = _collected(filling, pieces, most_bytes_waiting=most)
    assert manifest == filling.expected
    room = collector.room
    assert room.bytes_held == 0
    if most is not None:
        assert room.bytes_held_most <= most
    if most == 0:
        assert bool(room.bytes_spilled) == bool(filling.fresh()[2])


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("parts", [1000, 3, 1])
def test_halves_of_a_fused_matrix_may_come_in_different_buckets(filling, order, parts):
    """A thousandth of a tensor at a time, a third, or all of it: the same arena."""
    pieces = list(_pieces(load_file(filling.file), lambda _, n: -(-n // parts)))
    pieces = pieces[::-1] if order == "reverse" else pieces
    assert _collected(filling, pieces)[0] == filling.expected


def test_in_layer_order_nothing_spills(waiting):
    """By default as much may wait as a layer has, so whole layers never meet the disk."""
    tensors = load_file(waiting.file)
    names = sorted(tensors, key=lambda name: name.split(".")[:3])
    pieces = _pieces({name: tensors[name] for name in names}, lambda *_: 1 << 20)
    _, collector = _collected(waiting, pieces)
    layer = sum(t.nbytes for name, t in tensors.items() if ".0." in name and t.ndim > 1)
    assert 0 < collector.room.bytes_held_most <= layer
    assert collector.room.bytes_spilled == 0


def test_a_tensor_is_cut_anywhere(plain):
    """Element by element across rows, for a rank that holds some columns only."""
    half = Filling(plain.folder, "plain", "float32", 1, ranks=2)
    tensors = load_file(plain.file)
    long = {name: 1000 if name != DOWN else 7 for name in tensors}
    pieces = list(_pieces(tensors, lambda name, _: long[name]))
    assert _collected(half, pieces[::-1])[0] == half.expected


WRONG = {
    "twice": ([(NORM, 0, 64), (NORM, 0, 64)], f"{NORM}: a part of it has come twice"),
    "overlapping": ([(QUERY, 0, 100), (QUERY, 99, 100)], f"{QUERY}.*twice"),
    "unknown": ([("odd", 0, 1)], "unknown tensor: odd"),
    "beyond the end": ([(NORM, 60, 5)], f"{NORM} has 64 elements"),
    "before the start": ([(NORM, -1, 5)], f"{NORM} has 64 elements"),
    "half an element": ([(NORM, 0, 1.25)], f"{NORM} has 64 elements"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("kind", ["plain", "waiting"])
def test_a_piece_that_is_wrong_is_refused_by_name(request, kind, case):
    """Twice, too long, unknown: whether the bytes go straight to the arena or wait."""
    pieces, words = WRONG[case]
    cut = [(name, first, bytes(int(4 * count))) for name, first, count in pieces]
    with pytest.raises(CheckpointError, match=words):
        _collected(request.getfixturevalue(kind), cut)


def test_gaps_are_named_at_the_end(waiting):
    """Every tensor of which something lacks, and how much."""
    pieces = [p for p in _pieces(load_file(waiting.file), lambda *_: 50) if p[:2] != (QUERY, 50)]
    with pytest.raises(CheckpointError, match=f"^incomplete tensors: {QUERY} lacks 50 elements$"):
        _collected(waiting, pieces)
    with pytest.raises(CheckpointError, match="and 21 more"):
        _collected(waiting, [])


@contextmanager
def _disk_that_holds(nbytes):
    """Makes every file end there, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing(waiting):
    """The piece that found no room is refused; when there is room again the load goes on."""
    arena, parts, processed, computed = waiting.fresh()
    pieces = list(_pieces(load_file(waiting.file), lambda *_: 999))
    refusals = []
    with Collector(arena, parts, processed, most_bytes_waiting=0) as collector:
        with _disk_that_holds(40_000):
            for piece in list(pieces):
                try:
                    collector.add(*piece)
                    pieces.remove(piece)
                except ResourceExhausted as error:
                    refusals.append(error)
        assert "TMPDIR" in refusals[0].details["hint"]
        for piece in pieces:
            collector.add(*piece)
        assert collector.finish(computed) == waiting.expected


def test_what_is_derived_is_rebuilt_in_place(filling, tmp_path):
    """Other weights over the same arena are what a fresh one holds, at the same addresses."""
    arena, parts, processed, computed = filling.fresh()
    tensors = load_file(filling.file)
    other = {
        name: one if one.itemsize == 1 else one.roll(1, 0) for name, one in tensors.items()
    }  # fmt: skip
    addresses = {name: one.data_ptr() for name, one in arena.tensors.items()}
    found = []
    for weights in (other, tensors):
        with Collector(arena, parts, processed) as collector:
            for piece in _pieces(weights, lambda _, n: -(-n // 3)):
                collector.add(*piece)
            found.append(collector.finish(computed))
    assert found[0] != found[1] == filling.expected
    assert {name: one.data_ptr() for name, one in arena.tensors.items()} == addresses
