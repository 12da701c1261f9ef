"""What losses, recoveries and scalings of one life came to, for whoever counts. Plain Python."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from engine_service.core.membership import ExpertReport


class Change(StrEnum):
    """What was done to the ranks."""

    RECOVER = "recover"
    SCALE = "scale"


class RecoveryTally:
    """Counts. Whoever decides who is lost counts `ranks_lost`; whoever recovers calls `ended`."""

    def __init__(self) -> None:
        self.ranks_lost = 0
        self.done: Counter[Change] = Counter()
        self.failed: Counter[Change] = Counter()
        self.last: ExpertReport | None = None
        """What the one did that was done last."""
        self.bytes_pulled = 0
        """From outside."""
        self.bytes_copied = 0
        """From ranks that lived."""
        self.seconds = dict.fromkeys(Change, 0.0)
        """That those took which were done."""
        self.seconds_paused = 0.0
        """In which no step could run because of a commit."""

    def ended(self, change: Change, report: ExpertReport | None) -> None:
        """Counts one that has ended; without a report it has failed."""
        if report is None:
            self.failed[change] += 1
            return
        self.done[change] += 1
        self.last = report
        self.bytes_pulled += report.bytes_pulled
        self.bytes_copied += report.bytes_copied
        self.seconds[change] += report.seconds
        self.seconds_paused += report.seconds_paused
