"""Memory of a rank's process, as the kernel counts it (proc(5)). Plain Python.

A process that has gone has none.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LENT = "/memfd:seedrelay-staging"
"""What memory is called that a rank lends to a relay to land new weights in."""
STAT_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Of one rank."""

    rank: int
    resident_bytes: int
    """The arena included."""
    staged_bytes: int
    """Of new weights, beside those that serve."""


def resident_bytes(pid: int) -> int:
    """Returns the bytes of a process that lie in memory. Cheap: the kernel has them counted."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * mmap.PAGESIZE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def staged_bytes(pid: int, arena: int) -> int:
    """Returns the bytes that a rank has staged beside the arena of this descriptor.

    That is pages of private mappings of the arena which were written, and what a relay has
    landed in memory that was lent to it. The kernel walks all mappings for it: not for the
    event loop.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        return _written_bytes(pid, os.fstat(arena).st_ino) + _lent_bytes(pid)
    return 0


def _written_bytes(pid: int, inode: int) -> int:
    total, inside = 0, False
    with Path(f"/proc/{pid}/smaps").open(encoding="ascii", errors="replace") as smaps:
        for line in smaps:
            words = line.split()
            if "-" in words[0]:  # the first line of a mapping
                inside = words[1].endswith("p") and int(words[4]) == inode
            elif inside and words[0] in ("Anonymous:", "Swap:"):
                total += int(words[1]) * 1024
    return total


def _lent_bytes(pid: int) -> int:
    total = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if str(path.readlink()).startswith(LENT):
                total += path.stat().st_blocks * STAT_BLOCK_BYTES
    return total
