"""Closes the gate, and opens it again. Plain Python."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from engine_service.core.engine import Engine
from engine_service.core.lifecycle import Lifecycle
from relay_service.core.instance import State


class PauseMode(StrEnum):
    """What becomes of requests that run when the gate closes."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
    RETRACT = "retract"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequest:
    """How to pause."""

    mode: PauseMode
    clear_cache: bool | None = None
    """Whether the prefix cache is emptied; none means yes, except for `KEEP`."""
    deadline_seconds: float | None = None
    on_deadline: PauseMode | None = None
    operator: str = ""
    drain_delay_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class PauseCounts:
    """Requests by what a pause did to them."""

    paused: int = 0
    aborted: int = 0
    retracted: int = 0
    finished: int = 0
    waiting: int = 0


@dataclass(slots=True, kw_only=True)
class PauseReport:
    """What a pause did."""

    requests: PauseCounts = field(default_factory=PauseCounts)
    was_paused: bool = False
    flushed_blocks: int = 0
    seconds: float = 0.0
    """From the closing of the gate until nothing ran."""
    mode: PauseMode


class Pauser:
    """The gate of one instance."""

    def __init__(self, lifecycle: Lifecycle, engine: Engine) -> None:
        self._lifecycle = lifecycle
        self._engine = engine

    @asynccontextmanager
    async def applying(self, request: PauseRequest) -> AsyncIterator[PauseReport]:
        """Holds steps back while weights are applied; goes back to the state before."""
        began, before = time.monotonic(), self._lifecycle.state
        async with self._engine.between_steps():
            self._lifecycle.to(State.UPDATING)
            try:
                yield PauseReport(
                    was_paused=before is State.PAUSED, mode=request.mode,
                    seconds=time.monotonic() - began,
                )  # fmt: skip
            finally:
                if self._lifecycle.state is State.UPDATING:
                    self._lifecycle.to(before)
