"""The order of packed matrices: what is declared, packed, described to oneDNN, and cut."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from cutting import carry_out
from format_cases import packs, rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.device.formats import int8, onednn, order, packed, processor
from engine_service.device.formats.layouts import INT8, PACKED
from engine_service.device.formats.linear import KERNELS
from engine_service.device.formats.tiles import Tiles
from engine_service.device.memfd_arena import MemfdArena
from engine_service.errors import EngineError
from relay_service.core.cut import Part
from relay_service.core.dtypes import DType
from relay_service.core.holder import Holder
from relay_service.core.layout import UnitSpec, lay_out
from relay_service.core.planner import Planner
from relay_service.errors import FormatMismatch

FORMATS = [
    pytest.param(PACKED, torch.bfloat16, id="packed", marks=packs),
    pytest.param(INT8, torch.float32, id="int8", marks=rounds),
]
known = pytest.mark.skipif(processor.bf16_order() is None, reason="this processor's order is new")
sizes = st.integers(1, 300)


def _numbers(rows, columns, dtype):
    """Returns a matrix of which nearly every element is another bit pattern."""
    width = {torch.int8: 251, torch.bfloat16: 31_000}[dtype]
    found = (torch.arange(rows * columns) * 7919 % width).view(rows, columns)
    return (found - 125).to(dtype) if dtype is torch.int8 else found.short().view(dtype)


def _declared(weight, tiles):
    """Packs a matrix element by element, as the declaration says."""
    rows, columns = weight.shape
    height, _, width = tiles.shape(-(-rows // tiles.rows) * tiles.rows, columns)
    found = torch.zeros(height * tiles.rows * width, dtype=weight.dtype)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    band, tile = row // tiles.rows * tiles.rows * width, column // tiles.columns
    within = (column % tiles.columns) // tiles.group * tiles.rows * tiles.group
    place = band + tile * tiles.rows * tiles.columns + within
    found[place + row % tiles.rows * tiles.group + column % tiles.group] = weight
    return found


def _bytes(packed_matrix, count, dtype):
    """Returns the first elements of what oneDNN has packed."""
    address = torch.ops.mkldnn.data_ptr(packed_matrix)
    raw = bytearray(ctypes.string_at(address, count * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype)


def _equal(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@packs
@known
@given(sizes, st.integers(32, 300))
def test_bfloat16_lies_in_the_declared_order(rows, columns):
    """In oneDNN's own memory as in the arena's, and oneDNN says so."""
    tiles, weight = processor.bf16_order(), _numbers(rows, columns, torch.bfloat16)
    expected = _declared(weight, tiles)
    theirs = packed._pack(weight)
    assert _equal(_bytes(theirs, len(expected), torch.bfloat16), expected)
    order.check(onednn.description(theirs), tiles, (rows, columns))
    ours = torch.zeros_like(expected)
    order.pack(weight, tiles, ours)
    assert _equal(ours, expected)


@rounds
@given(sizes, sizes)
def test_whole_numbers_lie_in_the_declared_order(rows, columns):
    """For one thread, for which the description is made."""
    tiles, weight = processor.INT8_ORDER, _numbers(rows, columns, torch.int8)
    expected = _declared(weight, tiles)
    theirs = torch.ops.onednn.qlinear_prepack(weight, None)
    assert _equal(_bytes(theirs, len(expected), torch.int8), expected)
    ours = torch.zeros_like(expected)
    order.pack(weight, tiles, ours)
    assert _equal(ours, expected)
    described = onednn.describe(
        ours.data_ptr(), (columns, rows), torch.int8, int8._order(rows, columns)
    )
    assert torch.ops.mkldnn._nbytes(described) == ours.nbytes


@packs
@known
def test_another_order_than_the_declared_is_refused():
    """Other tiles, another size, or what an order of one thread fewer would be."""
    found = onednn.description(packed._pack(torch.zeros(128, 96, dtype=torch.bfloat16)))
    tiles = processor.bf16_order()
    order.check(found, tiles, (128, 96))
    for other in (tiles._replace(rows=16), tiles._replace(columns=64), tiles._replace(group=4)):
        with pytest.raises(EngineError, match=r"not in tiles .*--weight-format plain"):
            order.check(found, other, (128, 96))
    for shape, transposed in (((96, 128), False), ((128, 128), False), ((128, 96), True)):
        with pytest.raises(EngineError, match="on this processor"):
            order.check(found, tiles, shape, transposed=transposed)


@rounds
@torch.inference_mode()
def test_threads_do_not_decide_the_order_of_whole_numbers():
    """Of several it would take smaller tiles for itself: it must read those that lie there."""
    weight, hidden = torch.randn(160, 96), torch.randn(5, 96)
    held = [torch.zeros(one.shape, dtype=torch.int8) for one in INT8.stored(DType.F32, 160, 96)[:1]]
    scale = torch.zeros(160)
    int8.process(weight, [*held, scale])
    expected = int8.forward(hidden, *held, scale)
    theirs = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        own = onednn.description(
            torch.ops.onednn.qlinear_prepack(torch.zeros(160, 96, dtype=torch.int8), None)
        )
        with pytest.raises(EngineError):
            order.check(own, processor.INT8_ORDER, (160, 96), transposed=True)
        int8._tiles.cache_clear()
        int8._order.cache_clear()
        packed_again = torch.zeros_like(held[0])
        int8.process(weight, [packed_again, scale])
        assert torch.equal(packed_again, held[0])
        assert torch.equal(int8.forward(hidden, packed_again, scale), expected)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(theirs)


@rounds
@torch.inference_mode()
def test_what_follows_the_tiles_is_not_read():
    """The description leaves out the sums that oneDNN would keep there."""
    memory, scale = torch.zeros(128 * 64 + 4 * 128, dtype=torch.int8), torch.zeros(128)
    stored, hidden = memory[: 128 * 64].view(2, 64, 64), torch.randn(3, 64)
    int8.process(torch.randn(128, 64), [stored, scale])
    expected = int8.forward(hidden, stored, scale)
    memory[128 * 64 :] = 77
    assert torch.equal(int8.forward(hidden, stored, scale), expected)


def _held(layout, dtype, parts, logical):
    """Returns a rank that holds parts of logical tensors in a format, and its arena."""
    specs = layout.specs("w", DType.BF16 if dtype is torch.bfloat16 else DType.F32, parts)
    arena = MemfdArena(lay_out(0, [UnitSpec("u", tuple(specs))]), "tests")
    stored = [arena.tensors[one.name] for one in specs]
    whole = torch.cat([logical[p.logical][p.rows[0] : sum(p.rows)] for p in parts])
    left, width = parts[0].columns
    weight = whole[:, left : left + width]
    if layout is INT8:
        int8.process(weight, stored, whole)
    else:
        KERNELS[layout.name].process(weight, stored)
    return Holder("rank", arena.manifest), arena


@st.composite
def _cuts(draw, heights, width, step):
    """Cuts fused matrices into one to three ranks, by rows or by columns, mostly at tiles."""
    ranks, by_rows = draw(st.integers(1, 3)), draw(st.booleans())

    def bounds(size):
        inner = draw(st.lists(st.integers(0, size // step), min_size=ranks - 1, max_size=ranks - 1))
        ends = sorted(min(size, one * step) for one in inner)
        firsts = [0, *ends]
        return [(a, b - a) for a, b in zip(firsts, [*ends, size], strict=True)]

    across = [(0, width)] * ranks if by_rows else bounds(width)
    down = [bounds(h) if by_rows else [(0, h)] * ranks for h in heights]
    return [
        [Part(f"m{n}", (h, width), down[n][r], across[r]) for n, h in enumerate(heights)]
        for r in range(ranks)
    ]


@pytest.mark.parametrize(("layout", "dtype"), FORMATS)
@settings(deadline=None)
@given(st.data())
@torch.inference_mode()
def test_packed_matrices_are_cut_between_tiles_or_not_at_all(layout, dtype, data):
    """Wherever ranks and fused parts end: the planned copy is what packing would give."""
    step = data.draw(st.sampled_from([16, 32, 64, 64, 64]))
    heights = [step * n for n in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))]
    width = step * data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(1)
    logical = {
        f"m{n}": torch.randn(height, width, generator=generator).to(dtype)
        for n, height in enumerate(heights)
    }
    placements = [data.draw(_cuts(heights, width, step)) for _ in range(2)]
    sources, targets = (
        [_held(layout, dtype, some, logical) for parts in ranks if (some := _some(parts))]
        for ranks in placements
    )
    planner = Planner([holder for holder, _ in sources])
    held = [bytes(arena.view(0, arena.manifest.data_bytes)) for _, arena in sources]
    for target, arena in targets:
        size = target.manifest.data_bytes
        try:
            copies = planner.plan(target)
        except FormatMismatch as error:
            refused = str(error)
        else:
            assert carry_out(copies, held, size) == arena.view(0, size)
            continue
        assert " tile" in refused


def _some(parts):
    return [part for part in parts if part.rows[1] and part.columns[1]]


def test_why_tiles_do_not_fit():
    """The words name the tile and what is wrong with it."""
    tiles = Tiles(64, 32, 2)

    def fault(*parts):
        return tiles.fault([Part("m", *one) for one in parts])

    assert fault(((128, 64), (0, 128), (0, 64))) == ""
    assert fault(((128, 70), (0, 128), (0, 70))) == "", "columns are padded alike everywhere"
    assert "a tile of 64 rows spans" in fault(((128, 64), (32, 64), (0, 64)))
    assert "a tile of 64 rows spans" in fault(((128, 64), (0, 32), (0, 64)))
    assert "a tile of 64 rows spans" in fault(
        ((96, 64), (0, 96), (0, 64)), ((64, 64), (0, 64), (0, 64))
    )
    assert "a tile of 32 columns spans" in fault(((128, 96), (0, 128), (0, 48)))
    assert "a tile of 32 columns spans" in fault(((128, 96), (0, 128), (48, 48)))
    assert "padded rows" in fault(((100, 64), (64, 36), (0, 64)))
    assert "wider" in fault(((128, 64), (0, 128), (0, 16)))


LIMITS = ["AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_FP16"]
PRODUCT = """
import torch
from engine_service.device.formats import processor
from engine_service.device.formats.layouts import LAYOUTS, choose_layout
from engine_service.device.formats.linear import Linear
from engine_service.device.torch_dtypes import MANIFEST_DTYPES, TORCH_DTYPES
torch.manual_seed(1)
with torch.inference_mode():
    for name, dtype in (("packed", torch.bfloat16), ("int8", torch.bfloat16)):
        layout = LAYOUTS[name]
        specs = layout.stored(MANIFEST_DTYPES[dtype], 128, 64)
        tensors = {"w" + s.suffix: torch.zeros(s.shape, dtype=TORCH_DTYPES[s.dtype]) for s in specs}
        matrix, weight = Linear("w", layout, 64, tensors), torch.randn(128, 64).to(dtype)
        matrix.fill(weight)
        hidden = torch.randn(7, 64).to(dtype)
        found, expected = matrix(hidden).float(), hidden.float() @ weight.float().T
        assert float((found - expected).norm() / expected.norm()) < 0.02, name
        print(name, specs[0].cut.sealed or specs[0].shape)
"""


@packs
@rounds
@pytest.mark.full
@pytest.mark.parametrize("limit", LIMITS)
def test_processors_with_fewer_instructions_have_orders_too(limit):
    """The order that is declared for them is the one that oneDNN takes, or they are sealed."""
    environment = os.environ | {
        "ONEDNN_MAX_CPU_ISA": limit,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert ("doesn't know" in found[0]) == (limit == "AVX512_CORE")
    assert found[1] == "int8 (2, 64, 64)"
