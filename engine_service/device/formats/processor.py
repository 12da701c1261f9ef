"""What this machine's processor can do. Free of torch."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path

from engine_service.device.formats.tiles import Tiles

_CPU_INFO = Path("/proc/cpuinfo")
TILES = frozenset({"avx512bw", "avx512vl", "avx512dq"})
"""What oneDNN needs for tiles of 64 by 64."""
INT8_TILES = TILES | {"avx512_vnni"}
"""What it needs for such tiles of whole numbers."""
_BF16_ORDERS = (
    (frozenset({"amx_bf16", "amx_tile"}), Tiles(32, 32, 2)),
    (frozenset({"avx512_bf16"}), Tiles(64, 32, 2)),
)
"""Those in which oneDNN packs bfloat16, by what the processor must have."""
_BF16_LIMITS = {"AVX512_CORE_BF16": Tiles(64, 32, 2), "AVX512_CORE_FP16": Tiles(64, 32, 2)}
INT8_ORDER = Tiles(64, 64, 4)
"""In which it packs whole numbers for one thread, whatever the processor."""


def flags() -> frozenset[str]:
    """Returns the kernel's names of the instructions that there are."""
    return _flags(_CPU_INFO)


@functools.cache
def _flags(info: Path) -> frozenset[str]:
    """Reads them once: it is asked for every matrix, and the file has a part per core."""
    if not info.exists():
        return frozenset()
    lines = info.read_text().splitlines()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def bf16_order() -> Tiles | None:
    """Returns in which tiles oneDNN packs bfloat16 here; None where that isn't known."""
    found = next((tiles for needs, tiles in _BF16_ORDERS if needs <= flags()), None)
    return _BF16_LIMITS.get(isa_limit()) if found and isa_limit() else found


def isa_limit() -> str:
    """Returns which instructions oneDNN was told to leave; empty where it may use all."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "")


def machine_facts() -> tuple[tuple[str, str], ...]:
    """Returns what libraries choose code and orders by: their version, and the processor."""
    vectors = sorted(flag for flag in flags() if flag.startswith(("avx", "amx")))
    return (
        ("machine.torch", importlib.metadata.version("torch")),
        ("machine.isa", " ".join(vectors)),
        ("machine.isa_limit", isa_limit()),
        ("machine.capability_limit", os.environ.get("ATEN_CPU_CAPABILITY", "")),
    )
