"""What a rank says of the bytes in its arena: block by block, tensor by tensor, piece by piece."""

import contextlib
import math

import pytest
import torch
import xxhash
from fake_cuda import FakeDriver
from fake_device import fake_device
from format_cases import CASES
from oracles import make
from tiny_llama import Sequence, run, serving_rank, start_message

from engine_service.core.check_messages import DigestWeights
from engine_service.core.comparing import entries, tensor_digests, with_manifest
from engine_service.device import checking, devices
from engine_service.device.checking import WeightChecker
from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.rank import Rank
from engine_service.errors import WrongState
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES

BEGIN, GO_ON = DigestWeights(begin=True), DigestWeights()


@pytest.fixture
def by_blocks(monkeypatch):
    """Makes a piece as small as it can be."""
    monkeypatch.setattr(checking, "PIECE_SECONDS", -1.0)


def _found(checker):
    """Digests everything; returns what was found, and in how many pieces."""
    answer, pieces = checker.answer(BEGIN), 1
    while answer.found is None:
        assert not answer.changed
        answer, pieces = checker.answer(GO_ON), pieces + 1
    return answer.found, pieces


def _flip(arena, entry, at=0):
    arena.view(entry.offset + at, 1)[0] ^= 1


def _bytes_of(tensor):
    """Returns the elements of a tensor in row-major order."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _check_whole(rank):
    found, _ = _found(rank.checker)
    assert found.manifest == rank.arena.digested()
    assert (found.address, found.misplaced) == (rank.arena.address, ())
    digests = tensor_digests(found)
    assert digests.keys() == rank.arena.tensors.keys()
    for name, tensor in rank.arena.tensors.items():
        assert digests[name] == xxhash.xxh3_128_digest(_bytes_of(tensor)), name


@pytest.mark.parametrize("family", ["llama", "llama, biased", "qwen3", "qwen2-moe", "dots1"])
def test_everything_is_digested_where_it_is_read(family, tmp_path):
    """Of every family: parameters and rotary tables, and nothing is read from elsewhere."""
    rank = serving_rank(make(family, tmp_path).folder, capture=True)
    _check_whole(rank)
    assert {"rotary.cos", "rotary.sin"} < rank.arena.tensors.keys()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_everything_that_a_format_derives_is_digested(untied, name, dtype):
    """Scales, zeros, packed tiles; each by its own name."""
    served = str(dtype).removeprefix("torch.")
    rank = Rank(start_message(untied, served, weight_format=name))
    loaded = rank.load(untied, lambda _done, _total: None)
    _check_whole(rank)
    known = tensor_digests(_found(rank.checker)[0])
    for entry in entries(rank.arena.manifest):
        _flip(rank.arena, entry, entry.nbytes - 1)
        found, _ = _found(rank.checker)
        (one,) = with_manifest(loaded.manifest, found, known)
        assert (one.rank, one.tensor, one.what) == (0, entry.name, "contents")
        assert one.block in loaded.manifest.blocks_at(entry.offset, entry.nbytes)
        _flip(rank.arena, entry, entry.nbytes - 1)


def test_a_tied_head_is_one_storage(tied):
    """It is an alias with the digest of what it shares."""
    found, _ = _found(serving_rank(tied).checker)
    aliases = [one for one in entries(found.manifest) if one.alias]
    digests = tensor_digests(found)
    assert [one.alias for one in aliases] == ["embed"]
    assert digests[aliases[0].name] == digests["embed"]


def test_a_tensor_that_is_read_elsewhere_is_named(tied):
    """As after a weight that was bound anew: replayed graphs would go on reading the old one."""
    rank = serving_rank(tied)
    layer = rank.model.layers[1]
    layer.post_norm = layer.post_norm.clone()
    assert _found(rank.checker)[0].misplaced == ("layer.1.post_norm",)


def test_steps_run_between_pieces(tied, by_blocks):
    """A piece ends in time, after a block if it must; tokens are those that come without."""
    rank = serving_rank(tied, capture=True)
    before, between = Sequence([3, 1, 4]), Sequence([3, 1, 4])
    run(rank.step, [before], 12)
    answer = rank.checker.answer(BEGIN)
    pieces = 1
    while answer.found is None:
        run(rank.step, [between], 1)
        answer, pieces = rank.checker.answer(GO_ON), pieces + 1
    assert pieces > rank.arena.manifest.block_count > 1
    run(rank.step, [between], 12 - len(between.output))
    assert between.output == before.output
    assert answer.found.manifest == rank.arena.digested()


def test_a_piece_takes_its_time_and_no_more():
    """Counted by a clock: as many blocks as fit, then steps have their turn."""
    layout = lay_out(0, [UnitSpec("u", (TensorSpec("w", DType.U8, (6 * BLOCK_BYTES,)),))])
    ticks = iter(range(1000))
    arena = MemfdArena(layout, "tests")
    checker = WeightChecker(arena, arena.tensors.values, lambda: next(ticks) * 0.008)
    answers = [checker.answer(BEGIN), checker.answer(GO_ON), checker.answer(GO_ON)]
    assert [one.found is not None for one in answers] == [False, False, True]
    assert all(one.seconds <= 0.04 for one in answers)
    assert checker.answer(GO_ON).found is None, "it was told already"


def test_weights_that_change_meanwhile_are_told(tied, by_blocks):
    """Rather than digests of a mixture; from the beginning it comes right again."""
    rank = serving_rank(tied)
    with pytest.raises(WrongState, match="no check has begun"):
        rank.checker.answer(GO_ON)
    assert not rank.checker.answer(BEGIN).changed
    with rank.arena.committing():
        pass
    assert rank.checker.answer(GO_ON).changed
    assert _found(rank.checker)[0].manifest == rank.arena.digested()
    with contextlib.suppress(ZeroDivisionError), rank.arena.committing():
        raise ZeroDivisionError
    assert rank.checker.answer(BEGIN).changed, "nobody knows what lies there"


ODD = (
    TensorSpec("scalar", DType.F32, ()),
    TensorSpec("empty", DType.BF16, (0,)),
    TensorSpec("column", DType.F32, (3, 2), strides=(1, 3)),
    TensorSpec("apart", DType.F4_E2M1X2, (3, 5), strides=(8, 1)),
    TensorSpec("far_apart", DType.F32, (700, 1000), strides=(1024, 1)),
    TensorSpec("long", DType.U8, (2 * BLOCK_BYTES + 3,)),
    TensorSpec("part", DType.U8, (70,), alias="long"),
)


def test_tensors_of_any_shape(by_blocks):
    """One whose elements lie apart is digested by its elements, an alias by what it shares."""
    layout = lay_out(0, [UnitSpec("odd", ODD)])
    arena = MemfdArena(layout, "tests")
    generator = torch.Generator().manual_seed(1)
    arena._bytes.copy_(torch.randint(256, (layout.data_bytes,), generator=generator))
    checker = WeightChecker(arena, arena.tensors.values)
    found, _ = _found(checker)
    assert (found.manifest, found.misplaced) == (arena.digested(), ())
    digests = tensor_digests(found)
    data = bytes(arena._bytes.numpy())
    for entry in entries(layout):
        held = data[entry.offset : entry.offset + entry.nbytes]
        if entry.name.endswith("apart"):
            size, pitch = entry.dtype.itemsize, entry.strides[0] * entry.dtype.itemsize
            row = math.prod(entry.shape[1:]) * size
            held = b"".join(held[n * pitch : n * pitch + row] for n in range(entry.shape[0]))
        assert digests[entry.name] == block_digest(held), entry.name
    apart = next(entry for entry in entries(layout) if entry.name == "apart")
    _flip(arena, apart, 6)  # between two rows
    (one,) = with_manifest(found.manifest, _found(checker)[0], digests)
    assert (one.tensor, one.what) == ("", "contents, between the tensors of odd")


def test_a_device_is_checked_too(tied, monkeypatch):
    """Blocks come to the host one by one; addresses are the device's."""
    driver = FakeDriver()
    monkeypatch.setattr(devices, "_open_cuda", lambda _: fake_device(driver))
    rank = Rank(start_message(tied, device="cuda"))
    loaded = rank.load(tied, lambda _done, _total: None)
    found, _ = _found(rank.checker)
    assert (found.manifest, found.misplaced) == (loaded.manifest, ())
    assert found.address == rank.arena.address
    expected, _ = _found(serving_rank(tied).checker)
    assert found.tensors == expected.tensors
