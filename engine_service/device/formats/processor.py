"""What this machine's processor can do. Free of torch."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
TILES = frozenset({"avx512bw", "avx512vl", "avx512dq"})
"""What oneDNN needs for tiles of 64 by 64."""
INT8_TILES = TILES | {"avx512_vnni"}
"""What it needs for such tiles of whole numbers."""


def flags() -> frozenset[str]:
    """Returns the kernel's names of the instructions that there are."""
    if not _CPU_INFO.exists():
        return frozenset()
    lines = _CPU_INFO.read_text().splitlines()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def machine_facts() -> tuple[tuple[str, str], ...]:
    """Returns what libraries choose code and orders by: their version, and the processor."""
    vectors = sorted(flag for flag in flags() if flag.startswith(("avx", "amx")))
    return (
        ("machine.torch", importlib.metadata.version("torch")),
        ("machine.isa", " ".join(vectors)),
        ("machine.isa_limit", os.environ.get("ONEDNN_MAX_CPU_ISA", "")),
        ("machine.capability_limit", os.environ.get("ATEN_CPU_CAPABILITY", "")),
    )
