"""How far a transfer is, as others are told: what the fleet sees of it. Plain Python."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from relay_service.core.pull_report import PathStep

MAX_STEPS = 8
MAX_REASON_CHARS = 200
WINDOW_SECONDS = 5.0
STEP_SECONDS = 0.1


class TransferState(msgspec.Struct, frozen=True, kw_only=True):
    """One pull, at one moment."""

    transfer: str
    instance: str
    """Name of the target."""
    address: str
    """Of the target's relay."""
    phase: str
    source_instance: str
    transport: str
    note: str
    bytes_verified: int
    bytes_total: int
    bytes_moved: int
    bytes_reread: int
    blocks_verified: int
    blocks_total: int
    blocks_failed: int
    bytes_per_second: int
    average_bytes_per_second: int
    age_seconds: float
    path: tuple[PathStep, ...] = ()
    """The last sources that were tried; those in use have no reason."""
    outcome: str = ""
    """Empty while it runs."""

    @property
    def remaining_seconds(self) -> float | None:
        """Time that the rest takes at this rate; None when nothing comes."""
        if self.outcome or self.bytes_per_second <= 0:
            return None
        return max(0, self.bytes_total - self.bytes_verified) / self.bytes_per_second

    @property
    def stage(self) -> tuple[object, ...]:
        """What is news when it changes, unlike the bytes that come all the time."""
        reasons = tuple((step.source_instance, step.reason) for step in self.path)
        now = (self.phase, self.source_instance, self.transport, self.outcome)
        return self.transfer, now, reasons


def last_steps(path: list[PathStep]) -> tuple[PathStep, ...]:
    """Copies the end of a path, with reasons of bounded length."""
    return tuple(
        PathStep(
            step.source_instance, step.address, step.transport, step.bytes_verified,
            step.reason[:MAX_REASON_CHARS], step.recut[:MAX_REASON_CHARS],
        )
        for step in path[-MAX_STEPS:]
    )  # fmt: skip


class RateMeter:
    """Tells a rate from a count that grows, over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples = deque([(clock(), 0)])

    def rate(self, count: int) -> float:
        """Takes note of the count; returns its growth per second. To be asked now and then."""
        now = self._clock()
        if now - self._samples[-1][0] >= STEP_SECONDS:
            self._samples.append((now, count))
        while len(self._samples) > 1 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return (count - before) / (now - since) if now > since else 0.0
