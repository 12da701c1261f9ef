"""Every format keeps its promise: what is processed into the arena is what is multiplied with."""

import math

import pytest
import torch
from format_cases import CASES, ERRORS, QUANTISED, error

from engine_service.config import WEIGHT_FORMATS
from engine_service.device.formats.layouts import AUTO, LAYOUTS, choose_layout
from engine_service.device.formats.linear import KERNELS, Linear
from engine_service.device.tolerance import relative_difference, tolerance
from engine_service.device.torch_dtypes import MANIFEST_DTYPES, TORCH_DTYPES
from engine_service.errors import ConfigError, EngineError
from relay_service.core.dtypes import DType

SIZES = [(64, 64), (199, 64), (1, 64), (30, 50), (96, 576), (300, 200)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


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
        hidden = torch.randn(40, size[1], generator=generator).to(dtype)
        found = matrix(hidden)
        assert (found.shape, found.dtype) == ((40, size[0]), dtype)
        assert error(hidden, weight, found) <= ERRORS[name, dtype]
        for tokens in (1, 3):
            assert relative_difference(found[:tokens], matrix(hidden[:tokens])) <= tolerance(dtype)
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


@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.inference_mode()
def test_the_same_matrix_becomes_the_same_bytes(name, dtype):
    """Whatever lay in memory before, and in its place."""
    weight = torch.randn(199, 64).to(dtype)
    fresh, used = (_matrix(LAYOUTS[name], 199, 64, dtype) for _ in range(2))
    used.fill(-3 * weight)
    used.fill(weight)
    fresh.fill(weight)
    for one, other in zip(fresh.tensors, used.tensors, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("name", "dtype"), QUANTISED)
@torch.inference_mode()
def test_what_was_quantised_is_quantised_to_itself(name, dtype):
    """An update that hands the same weights back, as they were read, moves them by 0.01 at most."""
    matrix = _matrix(LAYOUTS[name], 96, 576, dtype)
    matrix.fill(torch.randn(96, 576))
    read = matrix(torch.eye(576, dtype=dtype)).T.contiguous()
    matrix.fill(read)
    again = matrix(torch.eye(576, dtype=dtype)).T
    assert float((again - read).float().norm() / read.float().norm()) <= 0.01


@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.inference_mode()
def test_equal_numbers_are_a_matrix_too(name, dtype):
    """A row, block or group without any differences, of zeros or others; and input of zeros."""
    matrix = _matrix(LAYOUTS[name], 160, 64, dtype)
    weight = torch.full((160, 64), 0.7).to(dtype)
    weight[130:] = 0
    matrix.fill(weight)
    hidden = torch.rand(3, 64).to(dtype)
    hidden[1] = 0
    expected = hidden.double() @ weight.double().T
    assert relative_difference(expected, matrix(hidden).double()) <= ERRORS[name, dtype]
    assert not matrix(hidden)[1].any()


@pytest.mark.parametrize("name", ["fp8", "fp8-ue8m0"])
@torch.inference_mode()
def test_every_number_of_float8_is_its_own(name):
    """Subnormal ones too, under a scale that takes the largest one to the largest there is."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    weight = codes.where(codes.isfinite(), 0.0).view(16, 16) / 8
    matrix = _matrix(LAYOUTS[name], 16, 16, torch.float32)
    matrix.fill(weight)
    assert torch.equal(matrix(torch.eye(16)).T, weight)


@pytest.mark.parametrize(("name", "dtype"), QUANTISED)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.inference_mode()
def test_what_is_not_finite_never_looks_finite(name, dtype, value):
    """Neither in the matrix nor in its input: the probe and the sampler refuse it then."""
    matrix = _matrix(LAYOUTS[name], 64, 64, dtype)
    weight, hidden = torch.randn(64, 64).to(dtype), torch.randn(3, 64).to(dtype)
    matrix.fill(weight)
    spoilt = hidden.clone()
    spoilt[1, 5] = value
    assert not matrix(spoilt)[1].isfinite().any()
    assert matrix(spoilt)[::2].isfinite().all()
    weight[7, 9] = value
    matrix.fill(weight)
    assert not matrix(hidden)[:, 7].isfinite().any()


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(
    "wrong", [torch.zeros(64, 65), torch.zeros(65, 64), torch.zeros(64, 64, dtype=torch.int8)]
)
def test_only_a_whole_matrix_of_floating_numbers_gets_in(name, dtype, wrong):
    """A cast into whole numbers without a scale would look like weights."""
    matrix = _matrix(LAYOUTS[name], 64, 64, dtype)
    with pytest.raises(EngineError, match="w takes floating numbers"):
        matrix.fill(wrong)
    assert not any(tensor.view(torch.uint8).any() for tensor in matrix.tensors)


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
    monkeypatch.setattr("engine_service.device.formats.processor._CPU_INFO", info)
    assert choose_layout("auto", DType.BF16, "cpu").name == "plain"
    with pytest.raises(ConfigError, match="avx512bw"):
        choose_layout("packed", DType.BF16, "cpu")


def test_auto_is_plain_where_packing_gains_nothing():
    """float32 and devices keep the checkpoint's bytes."""
    assert choose_layout("auto", DType.F32, "cpu").name == "plain"
    assert choose_layout("auto", DType.BF16, "cuda").name == "plain"


def test_settings_name_every_format():
    """What an operator may ask for is what there is."""
    assert WEIGHT_FORMATS == (AUTO, *LAYOUTS) == (AUTO, *KERNELS)
