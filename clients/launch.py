"""Starts services as processes of their own: for demos, benchmarks and tests.

A service says one line of JSON when it listens; its log goes to a file, whose end
is shown when it does not come up.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

LISTEN_SECONDS = 60.0
STOP_SECONDS = 20.0
_TAIL_CHARS = 2000


class LaunchError(Exception):
    """A service did not come up; carries the end of its log."""


class Service:
    """A running service. Leaving the context ends it: kindly, then by force."""

    def __init__(self, arguments: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        """Starts `seedrelay ARGUMENTS` and waits until it listens. Raises `LaunchError`."""
        self.log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "clients", *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sink,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        line = self._first_line()
        self.address: str = line["address"]
        self.instance: str = line["instance"]
        self.metrics_address: str = line.get("metrics_address", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process of the service."""
        return self.process.pid

    def stop(self) -> int:
        """Asks the service to end and waits for it; returns its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kills the service (SIGKILL) and waits until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Waits for the end, by force when it does not come; returns the exit status."""
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        return self.process.returncode

    def processes(self) -> list[int]:
        """Lists the service's process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("ascii")
        return [self.pid, *map(int, children.split())]

    def log_tail(self) -> str:
        """Returns the end of the log."""
        return self.log.read_text("utf-8", "replace")[-_TAIL_CHARS:]

    def _first_line(self) -> dict[str, str]:
        stdout, deadline = self.process.stdout, time.monotonic() + LISTEN_SECONDS
        waiting = select.poll()  # `select` itself fails in a process with many open files
        if stdout:
            waiting.register(stdout, select.POLLIN)
        while stdout and (left := deadline - time.monotonic()) > 0:
            if waiting.poll(1000 * left):
                line = stdout.readline()
                if line:
                    said: dict[str, str] = json.loads(line)
                    return said
                break
        self.process.kill()
        self.wait()
        raise LaunchError(f"the service did not come up:\n{self.log_tail()}")
