"""How fast a source gives, counted while something is asked of it. Plain Python."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

HALF_LIFE_SECONDS = 2.0
"""What came longer ago than that counts half, so that a source which slows down is seen."""
SETTLE_SECONDS = 0.5
"""Before that nobody can tell how fast it is."""


class Pace:
    """Bytes per second of one source. Landings are told from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at = self._last = clock()
        self._asked = 0
        """Reads that run."""
        self._bytes = self._seconds = 0.0
        """Of late: older ones count less and less."""
        self._busy_seconds = 0.0

    def asked(self) -> None:
        """Takes note that a read begins."""
        with self._lock:
            self._roll()
            self._last = self._at if not self._asked else self._last
            self._asked += 1

    def answered(self) -> None:
        """Takes note that a read has ended."""
        with self._lock:
            self._roll()
            self._asked -= 1

    def landed(self, nbytes: int) -> None:
        """Takes note of bytes that came."""
        with self._lock:
            self._roll()
            self._bytes += nbytes
            self._last = self._at

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of it."""
        return not self._asked

    @property
    def busy_seconds(self) -> float:
        """Time in which something was asked of it."""
        with self._lock:
            self._roll()
            return self._busy_seconds

    @property
    def silent_seconds(self) -> float:
        """Time for which nothing has come of what it is asked for; 0 while nothing is."""
        with self._lock:
            self._roll()
            return self._at - self._last if self._asked else 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second of late; None while that cannot be told."""
        with self._lock:
            self._roll()
            return self._bytes / self._seconds if self._busy_seconds >= SETTLE_SECONDS else None

    def seconds_for(self, nbytes: int) -> float | None:
        """Returns how long it needs for one read beside its others; None if nobody can tell."""
        rate, reads = self.rate, max(1, self._asked)
        if rate is None:
            return None
        return nbytes * reads / rate if rate else math.inf

    def _roll(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        if self._asked:
            fading = 0.5 ** (passed / HALF_LIFE_SECONDS)
            self._bytes *= fading
            self._seconds = self._seconds * fading + passed
            self._busy_seconds += passed


def fraction(pace: Pace, among: Sequence[Pace]) -> float:
    """Returns the part of some work that one should take of it, so that all end together.

    Whose pace nobody knows counts as one of the others.
    """
    rates = [one.rate for one in among]
    known = [rate for rate in rates if rate is not None]
    usual = sum(known) / len(known) if known else 1.0
    mine, total = pace.rate, sum(usual if rate is None else rate for rate in rates)
    return (usual if mine is None else mine) / total if total else 1 / len(among)
