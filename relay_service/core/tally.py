"""What the pulls of a relay have moved, summed up. Plain Python."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from relay_service.core.pull import Puller
from relay_service.core.pull_report import bytes_by_transport


@dataclass
class Tally:
    """Sums over pulls; they only grow."""

    bytes_received: Counter[str] = field(default_factory=Counter)
    """By transport, wrong ones included."""
    blocks_verified: int = 0
    blocks_failed: int = 0
    seconds_matching: float = 0.0
    seconds_transfer: float = 0.0
    """Time of pulls that have ended, by phase."""
    transfers: Counter[str] = field(default_factory=Counter)
    """By outcome."""

    def add(self, puller: Puller) -> None:
        """Adds what a pull has done so far."""
        report = puller.report
        self.bytes_received += bytes_by_transport(report.path)
        self.blocks_verified += puller.blocks_landed
        self.blocks_failed += puller.blocks_failed

    def end(self, puller: Puller, outcome: str) -> None:
        """Adds a pull that has ended."""
        self.add(puller)
        self.transfers[outcome] += 1
        self.seconds_matching += puller.report.seconds_matching
        self.seconds_transfer += puller.report.seconds_transfer

    def with_running(self, pullers: list[Puller]) -> Tally:
        """Returns the sums with pulls that still run."""
        now = copy.deepcopy(self)
        for puller in pullers:
            now.add(puller)
        return now
