"""Every format keeps its promise: what is processed into the arena is what is multiplied with."""

import pytest
import torch
from tiny_llama import Sequence, run, start_message, write_checkpoint

from engine_service.device.formats.layouts import LAYOUTS, choose_layout
from engine_service.device.formats.linear import Linear
from engine_service.device.rank import Rank
from engine_service.device.tolerance import relative_difference
from engine_service.device.torch_dtypes import MANIFEST_DTYPES, TORCH_DTYPES
from engine_service.errors import ConfigError
from relay_service.core.dtypes import DType

CAN_PACK = choose_layout("auto", DType.BF16, "cpu").name == "packed"
packs = pytest.mark.skipif(not CAN_PACK, reason="this processor cannot pack")
CASES = [
    ("plain", torch.float32),
    ("plain", torch.bfloat16),
    pytest.param("packed", torch.bfloat16, marks=packs),
]
ERROR = {("plain", torch.float32): 1e-6}
SIZES = [(64, 64), (199, 64), (1, 64), (30, 50), (96, 576)]


def _packed_rank(folder):
    return Rank(start_message(folder, "bfloat16", weight_format="packed"))


def _matrix(layout, rows, columns, dtype):
    """Returns a matrix on memory of its own, all zero."""
    declared = layout.stored(MANIFEST_DTYPES[dtype], rows, columns)
    tensors = {
        "w" + one.suffix: torch.zeros(one.shape, dtype=TORCH_DTYPES[one.dtype]) for one in declared
    }
    return Linear("w", layout, columns, tensors)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.inference_mode()
def test_a_product_is_that_of_the_processed_matrix(name, dtype, size):
    """For one row and for many, and after another matrix was processed into its place."""
    matrix = _matrix(LAYOUTS[name], *size, dtype)
    assert matrix.shape == size
    addresses = [tensor.data_ptr() for tensor in matrix.tensors]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(size, generator=generator).to(dtype)
        matrix.fill(weight)
        for tokens in (1, 3, 40):
            hidden = torch.randn(tokens, size[1], generator=generator).to(dtype)
            expected = hidden.double() @ weight.double().T
            difference = relative_difference(expected, matrix(hidden).double())
            assert difference <= ERROR.get((name, dtype), 2**-7)
    assert [tensor.data_ptr() for tensor in matrix.tensors] == addresses


@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.inference_mode()
def test_bytes_alone_carry_a_matrix(name, dtype):
    """What was copied from elsewhere is multiplied with, without being processed here."""
    seed, target = (_matrix(LAYOUTS[name], 199, 64, dtype) for _ in range(2))
    hidden = torch.randn(2, 64).to(dtype)
    assert not target(hidden).any()
    seed.fill(torch.randn(199, 64).to(dtype))
    for mine, theirs in zip(target.tensors, seed.tensors, strict=True):
        mine.copy_(theirs)
    assert torch.equal(target(hidden), seed(hidden))


@packs
def test_a_packed_model_computes_what_a_plain_one_does(untied, tied):
    """Eager and replayed, prompt and answer; embedding and packed head of a tied model too."""
    for folder in (tied, untied):
        ranks = {}
        for name in ("plain", "packed"):
            rank = ranks[name] = Rank(start_message(folder, "bfloat16", weight_format=name))
            rank.load(folder, lambda _done, _total: None)
            rank.capture()
        recorded = ranks["plain"].record_probe().probe
        ranks["packed"].check_probe(recorded)
        assert ranks["packed"].facts != ranks["plain"].facts


@packs
def test_a_packed_graph_follows_bytes_that_land(tied, tmp_path):
    """A dummy captured on zeros computes with the weights that are copied into its arena."""
    seed = _packed_rank(tied)
    loaded = seed.load(tied, lambda _done, _total: None)
    seed.capture()
    target = _packed_rank(tied)
    target.capture()
    for mine, theirs in zip(
        target.arena.tensors.values(), seed.arena.tensors.values(), strict=True
    ):
        mine.copy_(theirs)
    assert target.arena.digested() == loaded.manifest
    target.arena.seal()
    mine, theirs = Sequence([3, 1, 4]), Sequence([3, 1, 4])
    run(target.step, [mine], 12)
    run(seed.step, [theirs], 12)
    assert mine.output == theirs.output


@packs
def test_packed_bytes_do_not_depend_on_who_loads(tied):
    """Two loads of one checkpoint have one digest."""
    found = [_packed_rank(tied).load(tied, lambda *_: None) for _ in range(2)]
    assert found[0].manifest.digest == found[1].manifest.digest != ""


@packs
def test_a_checkpoint_of_another_type_is_packed_as_served(tmp_path):
    """float32 on disk, bfloat16 served: as if it had been converted first."""
    wide = write_checkpoint(tmp_path / "wide")
    narrow = write_checkpoint(tmp_path / "narrow", dtype=torch.bfloat16)
    found = [
        Rank(start_message(folder, "bfloat16", weight_format="packed")).load(
            folder, lambda *_: None
        )
        for folder in (wide, narrow)
    ]
    assert found[0].manifest.digest == found[1].manifest.digest


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [("packed", DType.F32, "cpu"), ("packed", DType.BF16, "cuda"), ("tiled", DType.BF16, "cpu")],
)
def test_a_format_that_cannot_serve_is_refused(name, dtype, device):
    """By name, with what would do."""
    with pytest.raises(ConfigError) as caught:
        choose_layout(name, dtype, device)
    assert caught.value.details["field"] == "weight_format"


def test_a_processor_without_the_instructions_is_served_plain(monkeypatch, tmp_path):
    """`auto` never chooses what cannot run; asking for it by name says why not."""
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2 avx512f\n")
    monkeypatch.setattr("engine_service.device.formats.layouts._CPU_INFO", info)
    assert choose_layout("auto", DType.BF16, "cpu").name == "plain"
    with pytest.raises(ConfigError, match="avx512bw"):
        choose_layout("packed", DType.BF16, "cpu")


def test_auto_is_plain_where_packing_gains_nothing():
    """float32 and devices keep the checkpoint's bytes."""
    assert choose_layout("auto", DType.F32, "cpu").name == "plain"
    assert choose_layout("auto", DType.BF16, "cuda").name == "plain"
