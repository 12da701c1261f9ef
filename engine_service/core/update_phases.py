"""How long updates take, by phase, and how they end. Plain Python."""

from __future__ import annotations

import time
from collections import Counter

from engine_service.core.update_request import Phase
from engine_service.core.version_history import Result


class PhaseClock:
    """Which phase an update is in, and how long it was in each."""

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self._since = time.monotonic()
        self._before: Counter[Phase] = Counter()

    def enter(self, phase: Phase) -> None:
        """Begins another phase."""
        self._before = self.seconds
        self.phase, self._since = phase, time.monotonic()

    @property
    def seconds(self) -> Counter[Phase]:
        """Seconds in each phase so far."""
        so_far = time.monotonic() - self._since
        return Counter({**self._before, self.phase: self._before[self.phase] + so_far})


class UpdateTally:
    """Of all updates of this life of an instance that have begun, and have ended."""

    def __init__(self) -> None:
        self.ended: Counter[Result] = Counter()
        self.seconds: Counter[tuple[Phase, Result]] = Counter()

    def add(self, result: Result, seconds: Counter[Phase]) -> None:
        """Books one that has ended, and how long it was in each phase."""
        self.ended[result] += 1
        for phase, taken in seconds.items():
            self.seconds[phase, result] += taken
