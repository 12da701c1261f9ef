"""Watches what processes use over time: seconds of processor, and memory of their own.

Memory is what no file and no other process shares (`RssAnon`, proc(5)): an arena is shared
memory, and would otherwise count once for everybody who maps it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

SAMPLE_SECONDS = 0.004
_TICKS = os.sysconf("SC_CLK_TCK")


class Use(NamedTuple):
    """What processes used within an interval."""

    cpu_seconds: float
    extra_bytes: int
    """Most memory beyond that at the interval's begin."""


class ProcessWatch:
    """Samples processes until its context is left."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._samples: list[tuple[float, float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> Use:
        """Returns the use between two times of the monotonic clock, which have passed."""
        first = max(i for i, sample in enumerate(self._samples) if i == 0 or sample[0] <= begin)
        within = [one for one in self._samples[first:] if one[0] <= end + SAMPLE_SECONDS]
        _, cpu, memory = within[0]
        return Use(within[-1][1] - cpu, max(one[2] for one in within) - memory)

    def _watch(self) -> None:
        while not self._stop.is_set():
            cpu = sum(map(_cpu_seconds, self._pids))
            memory = sum(map(_own_bytes, self._pids))
            self._samples.append((time.monotonic(), cpu, memory))
            self._stop.wait(SAMPLE_SECONDS)


def started(pid: int) -> float:
    """Returns when a process was started, on the monotonic clock."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(pid)[19]) / _TICKS
    return time.monotonic() - age


def _cpu_seconds(pid: int) -> float:
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / _TICKS


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()


def _own_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])
