"""Declares which arena tensors a weight matrix becomes in each format. Free of torch.

So that an arena can be planned while torch is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from engine_service.errors import ConfigError
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec

AUTO = "auto"
_PACKED_TILE = 64
_CPU_INFO = Path("/proc/cpuinfo")


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
    """The tensors of a matrix, by the type that the model computes in, rows and columns."""
    facts: Callable[[], tuple[tuple[str, str], ...]] = tuple
    """What decides the meaning of the bytes beside name, version and shape."""
    streams: bool = False
    """Whether the bytes are those of a checkpoint, and can be read into place."""

    def names(self, matrix: str) -> list[str]:
        """Returns the names of a matrix's tensors, in order."""
        return [matrix + one.suffix for one in self.stored(DType.F32, 1, 1)]

    def specs(
        self, matrix: str, dtype: DType, shape: tuple[int, ...], logical: str
    ) -> list[TensorSpec]:
        """Declares the tensors of a matrix `[rows, columns]` that is made of `logical`."""
        rows, columns = shape
        return [
            TensorSpec(matrix + one.suffix, one.dtype, one.shape, one.kind, logical)
            for one in self.stored(dtype, rows, columns)
        ]


def choose_layout(name: str, dtype: DType, device: str) -> Layout:
    """Returns a layout by name, or for `auto` the one that serves fastest here.

    Raises `ConfigError` for a name that isn't one, and for one that cannot serve here.
    """
    if name == AUTO:
        return LAYOUTS["packed" if _can_pack(dtype, device) else "plain"]
    if name not in LAYOUTS:
        raise ConfigError(
            f"weight format {name} is not supported",
            field="weight_format", found=name, expected=" | ".join([AUTO, *LAYOUTS]),
        )  # fmt: skip
    if name == "packed" and not _can_pack(dtype, device):
        raise ConfigError(
            "weights are packed in bfloat16 on a CPU with avx512bw, avx512vl and avx512dq only",
            field="weight_format", found=f"{dtype} on {device}", expected="plain",
        )  # fmt: skip
    return LAYOUTS[name]


def _plain(dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    return (Stored("", dtype, (rows, columns)),)


def _packed(dtype: DType, rows: int, columns: int) -> tuple[Stored, ...]:
    """Tiles are padded with zeros; the padding is spread over the rows."""
    padded = _up(rows, _PACKED_TILE) * _up(columns, _PACKED_TILE)
    return (Stored("", dtype, (rows, -(-padded // rows)), "derived"),)


def machine_facts() -> tuple[tuple[str, str], ...]:
    """Returns what libraries choose their code by: their version, and the processor."""
    vectors = sorted(flag for flag in _cpu_flags() if flag.startswith(("avx", "amx")))
    return (
        ("machine.torch", importlib.metadata.version("torch")),
        ("machine.isa", " ".join(vectors)),
        ("machine.isa_limit", os.environ.get("ONEDNN_MAX_CPU_ISA", "")),
    )


def _can_pack(dtype: DType, device: str) -> bool:
    return (
        device == "cpu"
        and dtype is DType.BF16
        and {"avx512bw", "avx512vl", "avx512dq"} <= _cpu_flags()
    )


def _cpu_flags() -> frozenset[str]:
    if not _CPU_INFO.exists():
        return frozenset()
    lines = _CPU_INFO.read_text().splitlines()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


PLAIN = Layout("plain", 1, _plain, streams=True)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {layout.name: layout for layout in (PLAIN, Layout("packed", 1, _packed, machine_facts))}
)
