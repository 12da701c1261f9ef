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

from engine_service.device.dtypes import SERVED
from engine_service.device.formats import processor
from engine_service.errors import ConfigError
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec

AUTO = "auto"
_TILE = 64
BLOCK = 128
"""Rows and columns of a block of float8 numbers."""
_INT4_ROWS = 16
INT4_COLUMNS = 32
"""torch's product wants rows and columns of `int4` in multiples of these."""
_INT4_LARGEST_GROUP = 128
_IN_BLOCKS = "scaled in blocks of the rank's own part"
_ROUNDED_INPUT = 3e-2
"""Tolerance where a last bit of the input decides which way it is rounded."""


class Stored(NamedTuple):
    """One arena tensor of a matrix."""

    suffix: str
    """What its name adds to the matrix's; empty for the matrix itself."""
    dtype: DType
    shape: tuple[int, ...]
    kind: str = "parameter"


class Layout(NamedTuple):
    """What one format stores."""

    name: str
    version: int
    stored: Callable[[DType, int, int], tuple[Stored, ...]]
    """The tensors of a matrix, by the type that the model computes in, rows and columns.

    The first one has as many rows as the matrix.
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
    sealed: str = ""
    """Why its matrices cannot be cut anew; empty where they can."""
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

    def specs(self, matrix: str, dtype: DType, parts: Sequence[Part]) -> list[TensorSpec]:
        """Declares the tensors of a matrix whose rows are parts of checkpoint tensors."""
        rows, columns = sum(part.rows[1] for part in parts), parts[0].columns[1]
        logical, cut = "+".join(part.logical for part in parts), Cut(tuple(parts), self.sealed)
        return [
            TensorSpec(matrix + one.suffix, one.dtype, one.shape, one.kind, logical, cut=cut)
            for one in self.stored(dtype, rows, columns)
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


def _plain(dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    return (Stored("", dtype, (rows, columns)),)


def _packed(dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    return (_spread(dtype, rows, _up(rows, _TILE) * _up(columns, _TILE)),)


def _int8(_dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    """Behind the tiles follow 32 bits per row, padded too."""
    elements = _up(rows, _TILE) * (_up(columns, _TILE) + DType.I32.itemsize)
    return _spread(DType.I8, rows, elements), Stored(".scale", DType.F32, (rows,), "scale")


def _fp8(_dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    return _blocks(DType.F32, rows, columns)


def _fp8_ue8m0(_dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    return _blocks(DType.F8_E8M0, rows, columns)


def _blocks(scales: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    return Stored("", DType.F8_E4M3, (rows, columns)), Stored(".scale", scales, grid, "scale")


def _int4(dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    """Scale and zero of a group lie side by side."""
    rows_padded, columns_padded = _up(rows, _INT4_ROWS), _up(columns, INT4_COLUMNS)
    group = math.gcd(columns_padded, _INT4_LARGEST_GROUP)
    scales = (columns_padded // group, rows_padded, 2)
    return (
        _spread(DType.U8, rows, rows_padded * columns_padded // 2),
        Stored(".scale", dtype, scales, "scale"),
    )


def _spread(dtype: DType, rows: int, elements: int) -> Stored:
    """Packed elements are padded with zeros; the padding is spread over the rows."""
    return Stored("", dtype, (rows, -(-elements // rows)), "derived")


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


PLAIN = Layout("plain", 1, _plain, streams=True)
PACKED = Layout(
    "packed", 1, _packed, processor.machine_facts,
    needs=processor.TILES, types=frozenset({DType.BF16}), sealed="packed in tiles",
)  # fmt: skip
INT8 = Layout(
    "int8", 1, _int8, processor.machine_facts,
    needs=processor.INT8_TILES, quantised=True, tolerance=_ROUNDED_INPUT, sealed="packed in tiles",
)  # fmt: skip
FP8 = Layout("fp8", 1, _fp8, quantised=True, sealed=_IN_BLOCKS)
FP8_UE8M0 = Layout("fp8-ue8m0", 1, _fp8_ue8m0, quantised=True, sealed=_IN_BLOCKS)
INT4 = Layout("int4", 1, _int4, processor.machine_facts, quantised=True, sealed="packed in groups")
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {layout.name: layout for layout in (PLAIN, PACKED, INT8, FP8, FP8_UE8M0, INT4)}
)
