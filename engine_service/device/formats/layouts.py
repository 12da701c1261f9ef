"""Declares which arena tensors a weight matrix becomes in each format. Free of torch.

So that an arena can be planned while torch is imported.

A format whose numbers are coarser than the model's type holds the matrices of the layers.
The embedding and the head, which decide between tokens, stay in the model's type: most
quantised checkpoints leave them so too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from engine_service.device.dtypes import SERVED
from engine_service.device.formats import processor
from engine_service.device.formats.tiles import Tiles, in_blocks, straddled
from engine_service.errors import ConfigError
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec

AUTO = "auto"
_LARGEST_TILE = 64
BLOCK = 128
"""Rows and columns of a block of float8 numbers."""
_INT4_ROWS = 16
INT4_COLUMNS = 32
"""torch's product wants rows and columns of `int4` in multiples of these."""
_INT4_LARGEST_GROUP = 128
_ROUNDED_INPUT = 3e-2
"""Tolerance where a last bit of the input decides which way it is rounded."""


class Stored(NamedTuple):
    """One arena tensor of a matrix."""

    suffix: str
    """What its name adds to the matrix's; empty for the matrix itself."""
    dtype: DType
    shape: tuple[int, ...]
    cut: Cut
    """What of the logical tensors it holds."""
    kind: str = "parameter"


class Layout(NamedTuple):
    """What one format stores."""

    name: str
    version: int
    of_parts: Callable[[DType, Sequence[Part]], tuple[Stored, ...]]
    """The tensors of a matrix, by the type that the model computes in, and its parts.

    All dimensions of the first one but the last make the rows of the matrix.
    """
    order_facts: Callable[[], tuple[tuple[str, str], ...]] = tuple
    """What decides the meaning of the bytes beside name, version and shape."""
    needs: frozenset[str] = frozenset()
    """Instructions that the processor must have."""
    types: frozenset[DType] = SERVED
    """Types of the model that it can serve."""
    streams: bool = False
    """Whether the bytes are those of a checkpoint, and can be read into place."""
    quantised: bool = False
    """Whether its numbers are coarser than the model's type."""
    scales_rows: bool = False
    """Whether numbers depend on the whole of a row, however few of its columns are held."""
    tolerance: float = 0.0
    """How far logits of the same weights may lie apart, beyond what the type allows."""
    head: Layout | None = None
    """Of the head, where that is another one."""

    @property
    def of_head(self) -> Layout:
        """The layout of the head."""
        return self.head or self

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Returns, in a fixed order, all that decides what the bytes of matrices mean."""
        own = (("weight_format", f"{self.name}/{self.version}"), *self.order_facts())
        if self.head is None:
            return own
        head = ("head_format", f"{self.head.name}/{self.head.version}")
        return tuple(dict.fromkeys((*own, head, *self.head.order_facts())))

    def names(self, matrix: str) -> list[str]:
        """Returns the names of a matrix's tensors, in order."""
        return [matrix + one.suffix for one in self.stored(DType.F32, 1, 1)]

    def stored(self, dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
        """Returns the tensors of a matrix that is a logical tensor of its own."""
        return self.of_parts(dtype, [Part("", (rows, columns), (0, rows), (0, columns))])

    def specs(self, matrix: str, dtype: DType, parts: Sequence[Part]) -> list[TensorSpec]:
        """Declares the tensors of a matrix whose rows are parts of checkpoint tensors."""
        logical = "+".join(part.logical for part in parts)
        return [
            TensorSpec(matrix + one.suffix, one.dtype, one.shape, one.kind, logical, cut=one.cut)
            for one in self.of_parts(dtype, parts)
        ]


def choose_layout(name: str, dtype: DType, device: str) -> Layout:
    """Returns a layout by name, or for `auto` the one that serves the type fastest here.

    Raises `ConfigError` for a name that isn't one, and for one that cannot serve here.
    """
    if name == AUTO:
        return PLAIN if _obstacle(PACKED, dtype, device) else PACKED
    if name not in LAYOUTS:
        raise ConfigError(
            f"weight format {name} is not supported",
            field="weight_format", found=name, expected=" | ".join([AUTO, *LAYOUTS]),
        )  # fmt: skip
    layout = LAYOUTS[name]
    if obstacle := _obstacle(layout, dtype, device):
        raise ConfigError(
            f"weight format {name} cannot serve {dtype} on {device} here: it needs {obstacle}",
            field="weight_format", found=f"{dtype} on {device}", expected="plain",
        )  # fmt: skip
    if not layout.quantised:
        return layout
    return layout._replace(head=choose_layout(AUTO, dtype, device))


def _obstacle(layout: Layout, dtype: DType, device: str) -> str:
    """Returns what a layout lacks to serve; empty when nothing does."""
    if layout is not PLAIN and device != "cpu":
        return "a CPU"
    if dtype not in layout.types:
        return " or ".join(sorted(layout.types))
    return ", ".join(sorted(layout.needs - processor.flags()))


def _plain(dtype: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    return (Stored("", dtype, _size(parts), Cut(tuple(parts))),)


def _packed(dtype: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    return (_in_tiles(dtype, parts, processor.bf16_order()),)


def _int8(_dtype: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    scales = tuple(
        msgspec.structs.replace(
            part, logical=f"{part.logical} scales", whole=(part.whole[0], 1), columns=(0, 1)
        )
        for part in parts
    )
    return (
        _in_tiles(DType.I8, parts, processor.INT8_ORDER),
        Stored(".scale", DType.F32, (_size(parts)[0],), Cut(scales), "scale"),
    )


def _fp8(_dtype: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    return _blocks(DType.F32, parts)


def _fp8_ue8m0(_dtype: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    return _blocks(DType.F8_E8M0, parts)


def _blocks(scales: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    rows, columns = _size(parts)
    fault = straddled(parts, BLOCK, BLOCK)
    sealed = f"scaled in tiles of {BLOCK} by {BLOCK}, and {fault}" if fault else ""
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    grid = Cut(tuple(in_blocks(parts, BLOCK, BLOCK, "scales")))
    return (
        Stored("", DType.F8_E4M3, (rows, columns), Cut(tuple(parts), sealed)),
        Stored(
            ".scale", scales, shape, _sealed(parts, "scales", sealed) if sealed else grid, "scale"
        ),
    )


def _int4(dtype: DType, parts: Sequence[Part]) -> tuple[Stored, ...]:
    """Scale and zero of a group lie side by side."""
    rows, columns = _size(parts)
    rows_padded, columns_padded = _up(rows, _INT4_ROWS), _up(columns, INT4_COLUMNS)
    group = math.gcd(columns_padded, _INT4_LARGEST_GROUP)
    scales = (columns_padded // group, rows_padded, 2)
    cut = Cut(tuple(parts), f"packed in groups of {group} columns that count from its own first")
    return (
        _spread(DType.U8, rows, rows_padded * columns_padded // 2, cut),
        Stored(".scale", dtype, scales, cut, "scale"),
    )


def _in_tiles(dtype: DType, parts: Sequence[Part], order: Tiles | None) -> Stored:
    """Packs a matrix so that it can be cut between tiles, or seals it."""
    rows, columns = _size(parts)
    elements = _up(rows, _LARGEST_TILE) * _up(columns, _LARGEST_TILE)
    if order is None:
        cut = Cut(tuple(parts), "packed in an order that this version doesn't know")
        return _spread(dtype, rows, elements, cut)
    if fault := order.fault(parts):
        return _spread(dtype, rows, elements, _sealed(parts, order.words, fault))
    return Stored("", dtype, order.shape(rows, columns), Cut(order.cut(parts)), "derived")


def _sealed(parts: Sequence[Part], what: str, reason: str) -> Cut:
    """Seals what would have been cut by this name.

    Rows and columns stay those of the checkpoint: in tiles, parts that differ could look alike.
    """
    return Cut(
        tuple(msgspec.structs.replace(part, logical=f"{part.logical} {what}") for part in parts),
        reason,
    )


def _spread(dtype: DType, rows: int, elements: int, cut: Cut) -> Stored:
    """Packed elements are padded with zeros; the padding is spread over the rows."""
    return Stored("", dtype, (rows, -(-elements // rows)), cut, "derived")


def _size(parts: Sequence[Part]) -> tuple[int, int]:
    return sum(part.rows[1] for part in parts), parts[0].columns[1]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


PLAIN = Layout("plain", 1, _plain, streams=True)
PACKED = Layout(
    "packed", 2, _packed, processor.machine_facts,
    needs=processor.TILES, types=frozenset({DType.BF16}),
)  # fmt: skip
INT8 = Layout(
    "int8", 2, _int8, processor.machine_facts,
    needs=processor.INT8_TILES, quantised=True, tolerance=_ROUNDED_INPUT, scales_rows=True,
)  # fmt: skip
FP8 = Layout("fp8", 1, _fp8, quantised=True)
FP8_UE8M0 = Layout("fp8-ue8m0", 1, _fp8_ue8m0, quantised=True)
INT4 = Layout("int4", 1, _int4, processor.machine_facts, quantised=True)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {layout.name: layout for layout in (PLAIN, PACKED, INT8, FP8, FP8_UE8M0, INT4)}
)
