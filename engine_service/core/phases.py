"""When each phase of the start began and ended. Plain Python."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Phase:
    """Interval of one phase, in seconds since the process started."""

    name: str
    begin_seconds: float
    end_seconds: float


@dataclass
class Phases:
    """Intervals of all phases, in the order of their begin."""

    origin: float = field(default_factory=lambda: time.monotonic() - _process_age_seconds())
    measured: list[Phase] = field(default_factory=list)

    def add(self, name: str, begin: float, end: float) -> None:
        """Adds a phase that was measured elsewhere, on the host's monotonic clock."""
        self.measured.append(Phase(name, begin - self.origin, end - self.origin))
        self.measured.sort(key=lambda phase: phase.begin_seconds)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measures one phase, also when it fails."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, begin, time.monotonic())


def _process_age_seconds() -> float:
    """Seconds since this process was started (proc(5): field 22 of stat, in clock ticks)."""
    fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
