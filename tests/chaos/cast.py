"""The processes of a run as the run sees them: what they say, and what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.chaos import actors

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.actors"])
"""What takes a second to import is imported once."""
END_SECONDS = 15.0


@dataclass(eq=False)
class Actor:
    """One process, and the last thing that it said of each kind."""

    name: str
    role: str
    log: Path
    arguments: tuple[Any, ...]
    said: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    was_stopped: bool = False
    killed: bool = False

    def start(self, heard: Callable[[Actor, dict[str, Any]], None]) -> Actor:
        """Starts the process; `heard` is called with whatever it says."""
        self._pipe, theirs = _context.Pipe()
        told = (self.role, theirs, str(self.log), *self.arguments)
        self.process = _context.Process(target=actors.be, args=told, name=self.name, daemon=True)
        self.process.start()
        theirs.close()
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._read)
        return self

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid or 0

    @property
    def alive(self) -> bool:
        """Whether it runs, or hangs."""
        return self.process.is_alive()

    def tell(self, command: str) -> None:
        """Says something to it, which it hears when it is awake."""
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, and waits until it is gone."""
        self.killed = True
        self.signal(signal.SIGKILL)
        self.process.join(END_SECONDS)

    def stop(self) -> None:
        """Has it hang."""
        self.stopped = self.was_stopped = True
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Wakes it up."""
        self.stopped = False
        self.signal(signal.SIGCONT)

    def end(self) -> int | None:
        """Asks it to leave and waits; returns its exit code, or none where it would not go."""
        self.tell("leave")
        self.process.join(END_SECONDS)
        code = self.process.exitcode
        if code is None:
            self.kill()
        self._close()
        return code

    def _read(self) -> None:
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._heard(self, self._pipe.recv())
        except (EOFError, ConnectionError):
            self._close()

    def _close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
