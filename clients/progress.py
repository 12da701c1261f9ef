"""Shows how far a pull, an update or a recovery is, on stderr: a bar on a terminal, or lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from seedrelay.v1 import engine_pb2, weights_pb2

LINE_SECONDS = 2.0
_MIB = 1 << 20


class _Bar:
    """One transfer's progress."""

    moving: tuple[str, ...] = ()
    """Phases in which bytes move."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._began = time.monotonic()
        self._said_at = 0.0
        self._phase = ""
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                TransferSpeedColumn(), TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def _show(self, phase: str, words: str, done: int, total: int) -> None:
        if not phase:
            return
        if self._bar:
            self._bar.update(self._task, description=words, total=total or None, completed=done)
        elif phase != self._phase or time.monotonic() - self._said_at > LINE_SECONDS:
            self._phase, self._said_at = phase, time.monotonic()
            moves = total and phase in self.moving
            line = words + (self._rate(done, total) if moves else "")
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _rate(self, done: int, total: int) -> str:
        rate = done / max(time.monotonic() - self._began, 1e-3)
        left = (total - done) / rate if rate else 0
        return (
            f": {done / _MIB:.0f} of {total / _MIB:.0f} MiB, {rate / _MIB:.0f} MiB/s, "
            f"{left:.0f} s left"
        )


class PullProgressBar(_Bar):
    """How far a pull is."""

    moving = ("transferring",)

    def show(self, progress: weights_pb2.PullProgress) -> None:
        """Shows a step."""
        done, total = progress.bytes_verified, progress.bytes_total
        self._show(progress.phase, _words(progress), done, total)


class UpdateProgressBar(_Bar):
    """How far an update is."""

    moving = ("staging",)

    def show(self, progress: engine_pb2.UpdateProgress) -> None:
        """Shows a step."""
        words = f"{progress.phase}{': ' + progress.note if progress.note else ''}"
        self._show(progress.phase, words, progress.bytes_done, progress.bytes_total)


class ExpertProgressBar(_Bar):
    """How far a recovery or a scaling of experts is."""

    moving = ("copying", "pulling", "reading", "staging")

    def show(self, progress: engine_pb2.ExpertProgress) -> None:
        """Shows a step."""
        where = f" from {progress.source}" if progress.source else ""
        words = f"{progress.phase}{where}{': ' + progress.note if progress.note else ''}"
        self._show(progress.phase, words, progress.bytes_done, progress.bytes_total)


def _words(progress: weights_pb2.PullProgress) -> str:
    if progress.source_instance:
        return f"{progress.phase} from {progress.source_instance} over {progress.transport or '?'}"
    return f"{progress.phase}{': ' + progress.note if progress.note else ''}"
