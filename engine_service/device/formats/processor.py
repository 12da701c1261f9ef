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


def order_facts(name: str, limit: str) -> tuple[tuple[str, str], ...]:
    """Returns what a library orders the bytes of a format by: its version and the processor.

    `limit` is the environment variable that forbids it some instructions.
    """
    return (
        (f"{name}.torch", importlib.metadata.version("torch")),
        (f"{name}.isa", " ".join(sorted(f for f in flags() if f.startswith(("avx", "amx"))))),
        (f"{name}.isa_limit", os.environ.get(limit, "")),
    )
