"""The weights that an instance has had, and the updates that failed. Plain Python."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine_service.core.pause_modes import PauseMode
from relay_service.core.instance import Weights

MAX_RECORDS = 256


class Result(StrEnum):
    """What became of an update."""

    SERVES = "serves"
    SERVED = "served"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """Weights that served, or that an update failed to bring."""

    version: str
    result: Result
    digest: str = ""
    epoch: int = 0
    """0 for an update that failed."""
    time: float = field(default_factory=time.time)
    """When they began to serve, or the update ended; seconds since 1970."""
    source: str = ""
    operator: str = ""
    reason: str = ""
    seconds_staged: float = 0.0
    seconds_paused: float = 0.0
    pause_mode: PauseMode | None = None
    bytes_changed: int = 0


class VersionHistory:
    """Records in the order of their time; of very many, the latest."""

    def __init__(self) -> None:
        self.records: list[VersionRecord] = []

    def add(self, record: VersionRecord) -> None:
        """Adds a record; one that serves ends the one before."""
        if record.result is Result.SERVES:
            self.end()
        self.records.append(record)
        if len(self.records) > MAX_RECORDS:
            # What serves is told, however many updates have failed since.
            oldest = next(n for n, one in enumerate(self.records) if one.result != Result.SERVES)
            del self.records[oldest]

    def end(self) -> None:
        """Takes note that what serves does so no longer."""
        self.records = [
            replace(one, result=Result.SERVED) if one.result is Result.SERVES else one
            for one in self.records
        ]

    def serve(self, weights: Weights, source: str, operator: str = "") -> None:
        """Records weights that serve from now on."""
        self.add(
            VersionRecord(
                version=weights.version, digest=weights.digest, epoch=weights.epoch,
                result=Result.SERVES, source=source, operator=operator,
            )
        )  # fmt: skip
