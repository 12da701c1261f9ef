"""Who wants an instance held still, and what follows from it. Plain Python.

Whoever wants the gate closed has a claim for as long as the call takes; a pause that
succeeds stays until somebody continues. Gate, steps and state follow from those alone, so a
caller who leaves, or fails, leaves everything as if it had not come:

    gate closed    somebody has paused, or has a claim and does not only turn away
    steps held     the gate is closed, and the latest claim does not wait for requests;
                   and while experts are lost
    state          UPDATING while weights are applied or experts are lost, PAUSED with any
                   claim or pause, else READY
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from engine_service.core.engine import Engine
from engine_service.core.gate import Closing
from engine_service.core.lifecycle import Lifecycle
from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.errors import EngineError, NotReady
from relay_service.core.instance import State

SOMEBODY = "somebody"


@dataclass(eq=False, slots=True)
class Claim:
    """A call that wants the gate closed."""

    closing: Closing
    was_paused: bool
    turns_away: bool
    """The gate is still open: health comes first."""
    drains: bool = False
    """It waits for requests to finish."""
    commits: bool = False
    """It is an update's."""
    overruled: EngineError | None = None
    """Why it cannot have what it waits for."""


class Claims:
    """The one place that closes the gate, holds steps back and says so."""

    def __init__(self, engine: Engine, lifecycle: Lifecycle) -> None:
        self.paused: Closing | None = None
        """The pause that stays until somebody continues."""
        self._engine = engine
        self._lifecycle = lifecycle
        self._claims: list[Claim] = []
        self._updating = False
        self._held: Closing | None = None

    def __bool__(self) -> bool:
        """Whether anybody holds the instance, or is about to."""
        return bool(self.paused or self._claims)

    @contextmanager
    def of(self, request: PauseRequest) -> Iterator[Claim]:
        """Holds a claim."""
        now = asyncio.get_running_loop().time()
        closing = Closing(request.operator or SOMEBODY, request.mode, now)
        turns_away = request.drain_delay_seconds > 0 and self._engine.gate.closed_by is None
        claim = Claim(closing, self.paused is not None, turns_away)
        self._claims.append(claim)
        self._settle()
        try:
            yield claim
        finally:
            self._claims.remove(claim)
            self._settle()

    @contextmanager
    def draining(self, claim: Claim) -> Iterator[None]:
        """Lets steps go on while a claim waits for requests."""
        claim.drains = True
        self._settle()
        try:
            yield
        finally:
            claim.drains = False
            self._settle()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Says that weights are being applied."""
        self._updating = True
        self._settle()
        try:
            yield
        finally:
            self._updating = False

    def hold(self, reason: str) -> None:
        """Holds the instance still, whoever else does or does not; with no reason no longer."""
        now = asyncio.get_running_loop().time()
        self._held = Closing(reason, PauseMode.KEEP, now) if reason else None
        self._settle()

    def close_gate(self, claim: Claim) -> None:
        """Closes the gate for a claim that has turned away long enough."""
        if claim.turns_away:
            claim.turns_away = False
            now = asyncio.get_running_loop().time()
            claim.closing = replace(claim.closing, since=now)
            self._settle()

    def stay(self, claim: Claim, mode: PauseMode) -> None:
        """Makes a pause of a claim; who paused before is still who has."""
        self.paused = replace(self.paused or claim.closing, mode=mode)

    def release(self) -> None:
        """Ends the pause that is there."""
        self.paused = None
        self._settle()

    def overrule(self, error: EngineError, which: Callable[[Claim], bool]) -> None:
        """Ends the waiting of some claims."""
        for claim in filter(which, self._claims):
            claim.overruled = claim.overruled or error
        self._engine.changed()

    def check(self, claim: Claim | None = None) -> None:
        """Raises what overruled a claim, or `NotReady` on an instance that does not serve."""
        if claim and claim.overruled:
            raise claim.overruled
        if not self._lifecycle.serves:
            state = self._lifecycle.state
            raise NotReady(
                f"the instance is {state}: it serves no weights",
                field="state", expected="READY | PAUSED", found=str(state),
            )  # fmt: skip

    def _settle(self) -> None:
        """Makes gate, steps and state follow."""
        engine = self._engine
        closers = [claim for claim in self._claims if not claim.turns_away]
        closing = self.paused or (closers[0].closing if closers else self._held)
        if closing:
            engine.gate.close(closing)
        else:
            engine.gate.open()
        engine.scheduler.admits_new = closing is None
        if self._held or (closing and not (closers and closers[-1].drains)):
            engine.freeze()
        else:
            engine.thaw()
        self._say(closing or next((claim.closing for claim in self._claims), None))

    def _say(self, closing: Closing | None) -> None:
        """Enters the state, unless the instance fails or ends: then nobody is told otherwise."""
        lifecycle = self._lifecycle
        if not lifecycle.serves:
            return
        if closing is None:
            state, reason = State.READY, ""
        elif self._updating:
            state, reason = State.UPDATING, "weights are being applied"
        elif self._held:
            state, reason = State.UPDATING, self._held.operator
        else:
            state, reason = State.PAUSED, f"paused by {closing.operator}"
        if lifecycle.state is not state:
            lifecycle.to(state, reason)
