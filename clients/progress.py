"""Shows how far a pull is: a bar on a terminal, plain lines elsewhere; always on stderr."""

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

from seedrelay.v1 import weights_pb2

LINE_SECONDS = 2.0
_MIB = 1 << 20


class PullProgressBar:
    """One pull's progress."""

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
            self._task = self._bar.add_task("pull", total=None)

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

    def show(self, progress: weights_pb2.PullProgress) -> None:
        """Shows a step."""
        if not progress.phase:
            return
        if self._bar:
            self._bar.update(
                self._task,
                description=_words(progress),
                total=progress.bytes_total or None,
                completed=progress.bytes_verified,
            )
        elif progress.phase != self._phase or time.monotonic() - self._said_at > LINE_SECONDS:
            self._phase, self._said_at = progress.phase, time.monotonic()
            print(self._line(progress), file=sys.stderr, flush=True)  # noqa: T201

    def _line(self, progress: weights_pb2.PullProgress) -> str:
        if not progress.bytes_total or progress.phase != "transferring":
            return _words(progress)
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate = progress.bytes_verified / seconds
        left = (progress.bytes_total - progress.bytes_verified) / rate if rate else 0
        return (
            f"{_words(progress)}: {progress.bytes_verified / _MIB:.0f} of "
            f"{progress.bytes_total / _MIB:.0f} MiB, {rate / _MIB:.0f} MiB/s, {left:.0f} s left"
        )


def _words(progress: weights_pb2.PullProgress) -> str:
    if progress.source_instance:
        return f"{progress.phase} from {progress.source_instance} over {progress.transport or '?'}"
    return f"{progress.phase}{': ' + progress.note if progress.note else ''}"
