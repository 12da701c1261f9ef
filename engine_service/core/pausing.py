"""Pauses an instance, and holds it still while its weights are changed. Plain Python.

Who wants what, and what follows from it, stands in `claims`; what a mode does to requests,
in `pause_modes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from engine_service.core.claims import SOMEBODY, Claim, Claims
from engine_service.core.engine import Engine
from engine_service.core.fair_lock import FairLock
from engine_service.core.gate import Closing, Ticket
from engine_service.core.lifecycle import Lifecycle
from engine_service.core.pause_modes import (
    PauseCounts,
    PauseMode,
    PauseReport,
    PauseRequest,
    ResumeReport,
    let_go,
)
from engine_service.core.request import Finish
from engine_service.errors import EngineError, NotReady, WaitTimeout, WrongState
from relay_service.core.instance import State

Trim = Callable[[], Awaitable[tuple[int, int]]]
"""Gives unused memory of devices back; returns the bytes reserved before and after."""
ADMISSION = "admission of a request"


class Pauser:
    """Pause, continue, and the stillness of a commit; one per instance."""

    def __init__(self, engine: Engine, lifecycle: Lifecycle, trim: Trim) -> None:
        self.lock = FairLock()
        """Readers are admissions, the writer is a commit."""
        self._engine = engine
        self._lifecycle = lifecycle
        self._claims = Claims(engine, lifecycle)
        self._trim = trim
        self._trim_is_due = False
        self._applying = False

    @asynccontextmanager
    async def admission(self, ticket: Ticket) -> AsyncIterator[None]:
        """Passes the gate, then holds the reader side of the lock.

        One that was aborted meanwhile needs neither. Raises `QueueFull`.
        """
        gate = self._engine.gate
        while True:
            await gate.passed(ticket)
            if ticket.aborted:
                yield
                return
            async with self.lock.reading(ADMISSION):
                if gate.closed_by is None:  # it may have been closed while the lock was held
                    yield
                    return

    async def pause(self, request: PauseRequest) -> PauseReport:
        """Closes the gate and lets go of what runs; stays so until `resume`.

        Raises `NotReady` on an instance that does not serve, `WaitTimeout` when requests still
        run at the deadline, `WrongState` when another call has decided otherwise meanwhile.
        """
        claims = self._claims
        claims.check()
        with claims.of(request) as claim:
            await self._turn_away(claim, request.drain_delay_seconds)
            async with self._quiet(claim, request) as report:
                claims.stay(claim, report.mode)
                if self._engine.scheduler.begun:
                    frozen = WrongState(f"{claim.closing.operator} has frozen what runs")
                    claims.overrule(frozen, lambda other: other.drains)
        return report

    async def resume(self, *, keep_reserved: bool = False) -> ResumeReport:
        """Opens the gate; ends pauses that still wait for requests. Else does nothing.

        Raises `NotReady`, and `WrongState` while weights are applied.
        """
        claims = self._claims
        self._check_not_applying()
        report = ResumeReport(PauseCounts(), was_paused=bool(claims))
        if self._trim_is_due and report.was_paused and not keep_reserved:
            self._trim_is_due = False
            report.reserved_bytes_before, report.reserved_bytes_after = await self._trim()
            self._check_not_applying()
        if report.was_paused:
            running = len(self._engine.scheduler.running)
            report.requests = PauseCounts(paused=running, waiting=self._waiting)
        continued = WrongState("another call has continued")
        claims.overrule(continued, lambda other: other.drains or other.turns_away)
        claims.release()
        return report

    @asynccontextmanager
    async def applying(self, request: PauseRequest) -> AsyncIterator[PauseReport]:
        """Within, no request is admitted and no step runs; the state is `UPDATING`.

        A pause that is there is taken as it is, and left. Afterwards everything is as before,
        also when the body raises; an instance that it left `FAILED` ends all its requests.
        Raises what `pause` does, and `WaitTimeout` when its turn does not come in time.
        """
        claims = self._claims
        claims.check()
        purpose = f"update by {request.operator or SOMEBODY}"
        async with self.lock.writing(purpose, request.deadline_seconds):
            claims.check()
            with claims.of(request) as claim:
                self._applying = claim.commits = True
                try:
                    claims.close_gate(claim)
                    async with self._quiet(claim, request, claims.paused) as report:
                        with claims.updating():
                            yield report
                        self._trim_is_due = True
                finally:
                    self._applying = False
                    if self._lifecycle.state is State.FAILED:
                        self.fail(NotReady(f"the instance has failed: {self._lifecycle.reason}"))

    def interrupt(self, reason: str) -> None:
        """Ends the waiting of a commit for requests; nothing is applied then."""
        late = NotReady(f"weights are not applied: {reason}")
        self._claims.overrule(late, lambda claim: claim.commits)

    def hold(self, reason: str) -> None:
        """Lets nothing run while experts are lost, whatever callers say; no reason ends it."""
        self._claims.hold(reason)

    def flush(self) -> int:
        """Empties the prefix cache; returns how many blocks that freed. Never takes held ones."""
        pool = self._engine.scheduler.pool
        freed = pool.unused
        pool.forget()
        return freed

    def abort_all(self) -> int:
        """Ends every answer with what it has; returns how many. A paused instance stays so."""
        return self._engine.abort_all()

    def stop(self) -> None:
        """Ends all pauses of an instance that drains: what they hold back ends with what it has."""
        engine, scheduler = self._engine, self._engine.scheduler
        if engine.gate.closed_by:
            engine.gate.abort_waiting()
            present = [*scheduler.running, *scheduler.waiting]
            held = [one for one in present if engine.frozen or not one.begun]
            scheduler.abort(held, engine.weights)
        self._give_up(NotReady("the instance is stopping"))

    def fail(self, error: EngineError) -> None:
        """Ends all pauses, and every request, with an error."""
        self._engine.fail_all(error)
        self._give_up(error)

    def _give_up(self, error: EngineError) -> None:
        self._claims.overrule(error, lambda _: True)
        self._claims.release()

    async def _turn_away(self, claim: Claim, seconds: float) -> None:
        if claim.turns_away:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._engine.until(lambda: claim.overruled is not None)
            self._claims.check(claim)
            self._claims.close_gate(claim)

    @asynccontextmanager
    async def _quiet(
        self, claim: Claim, request: PauseRequest, reused: Closing | None = None
    ) -> AsyncIterator[PauseReport]:
        """Lets go of what runs, unless a pause is `reused`; within, no step runs."""
        clock, mode, finished = asyncio.get_running_loop().time, request.mode, 0
        began = clock()
        if reused:
            mode = PauseMode(reused.mode)
        elif mode is PauseMode.WAIT:
            mode, finished = await self._drained(claim, request)
        engine = self._engine
        async with engine.between_steps():
            self._claims.check(claim)
            does = PauseMode.KEEP if reused else mode
            counts = let_go(engine.scheduler, does, engine.weights)
            counts.finished, counts.waiting = finished, self._waiting
            clears = mode is not PauseMode.KEEP
            if request.clear_cache is not None:
                clears = request.clear_cache
            flushed = self.flush() if clears else 0
            yield PauseReport(counts, claim.was_paused, flushed, clock() - began, mode)

    async def _drained(self, claim: Claim, request: PauseRequest) -> tuple[PauseMode, int]:
        """Lets requests finish; returns what becomes of the others, and how many have."""
        engine, mode = self._engine, PauseMode.WAIT
        begun = engine.scheduler.begun
        with self._claims.draining(claim):
            try:
                async with asyncio.timeout(request.deadline_seconds):
                    await engine.until(lambda: not engine.scheduler.begun or bool(claim.overruled))
            except TimeoutError:
                if request.on_deadline is None:
                    raise WaitTimeout(
                        f"{len(engine.scheduler.begun)} requests still run "
                        f"after {request.deadline_seconds:g} s", field="deadline",
                        hint="name a mode for them in on_deadline, or wait longer",
                    ) from None  # fmt: skip
                mode = request.on_deadline
        self._claims.check(claim)
        by_themselves = [one for one in begun if one.finish in (Finish.STOP, Finish.LENGTH)]
        return mode, len(by_themselves)

    @property
    def _waiting(self) -> int:
        return self._engine.gate.waiting + len(self._engine.scheduler.waiting)

    def _check_not_applying(self) -> None:
        self._claims.check()
        if self._applying:
            state = str(self._lifecycle.state)
            raise WrongState("weights are being applied", field="state", found=state)
