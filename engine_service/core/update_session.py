"""One session of an update: who has it, for how long, and how it ends. Plain Python."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from engine_service.core.replies import quiet
from engine_service.core.update import Update
from engine_service.core.update_checks import SERVING
from engine_service.core.update_request import StagedWeights, UpdateProgress, UpdateReport
from engine_service.core.update_sources import UpdateSource
from engine_service.core.version_history import Result, VersionRecord
from engine_service.errors import UpdateEnded, WrongState
from relay_service.core.instance import State

LIVE = (*SERVING, State.UPDATING)


class Session:
    """Lives as long as somebody says a word within its lease, or has it stage.

    It ends once: committed, failed or aborted. Then nothing of it is left on any rank.
    """

    def __init__(
        self, update: Update, operator: str, lease_seconds: float, on_end: Callable[[], None]
    ) -> None:
        self.name = uuid.uuid4().hex
        self.update = update
        self.operator = operator
        self.lease_seconds = lease_seconds
        self.result: Result | None = None
        """How it has ended; none while it is open."""
        self.reason = ""
        self.report: UpdateReport | None = None
        self.error: BaseException | None = None
        """What it failed with."""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._lease: asyncio.TimerHandle | None = None
        self._staging: asyncio.Future[StagedWeights] | None = None
        self._committing: asyncio.Future[UpdateReport] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._over = asyncio.Event()
        self._guard = asyncio.ensure_future(self._follow())
        self.renew()

    @property
    def is_committing(self) -> bool:
        """Whether its commit has begun, and has not ended."""
        return self._committing is not None and not self._committing.done()

    @property
    def age_seconds(self) -> float:
        """Since it began."""
        return self._loop.time() - self._began

    @property
    def lease_left_seconds(self) -> float:
        """Until the lease ends; 0 while it does not run."""
        return max(0.0, self._lease.when() - self._loop.time()) if self._lease else 0.0

    @property
    def progress(self) -> UpdateProgress:
        """How far it is."""
        return self.update.progress(self.name)

    def renew(self) -> None:
        """Prolongs the lease. Raises `UpdateEnded`."""
        self._check_open()
        self._let_lease_be()
        if self._committing is None:
            over = "its lease has ended without a word from its caller"
            self._lease = self._loop.call_later(self.lease_seconds, self.end, Result.ABORTED, over)

    def hold_lease(self) -> None:
        """Stops the lease while the engine is at work. Raises `UpdateEnded`."""
        self._check_open()
        self._let_lease_be()

    async def stage(self, source: UpdateSource) -> StagedWeights:
        """Stages and proves; the lease does not run meanwhile, unless the source lets it.

        A caller that leaves ends the session, and so does whatever fails. Raises what
        `Update.stage` does, `UpdateEnded`, or `WrongState` when it was staged already.
        """
        self._check_open()
        if self._staging:
            raise WrongState("it is being staged, or is staged", field="session", found=self.name)
        self._let_lease_be()
        self._staging = quiet(asyncio.ensure_future(self.update.stage(source)))
        try:
            await asyncio.wait([self._staging])
        except asyncio.CancelledError:
            self.end(Result.ABORTED, "its caller has left")
            raise
        if self._staging.cancelled():
            await self.has_ended()
            raise UpdateEnded(f"the update has ended: {self.reason}", session=self.name)
        if error := self._staging.exception():
            self.error = error
            await self.ended(Result.FAILED, str(error))
            raise error
        self.renew()
        return self._staging.result()

    async def commit(self) -> UpdateReport:
        """Applies what is staged; a caller that leaves ends nothing. May be repeated.

        Raises what `Update.commit` does, `UpdateEnded`, or `WrongState` before it is staged.
        """
        if self._committing is None:
            self._check_open()
            if self.update.staged is None:
                raise WrongState("it is not staged yet", field="session", found=self.name)
            self._let_lease_be()
            self._committing = quiet(asyncio.ensure_future(self._commit()))
        return await asyncio.shield(self._committing)

    async def abort(self, reason: str) -> bool:
        """Ends it; returns whether there was something to end. Raises `WrongState` in a commit."""
        if self.is_committing and self.result is None:
            raise WrongState("its commit is being applied", field="session", found=self.name)
        was_open = self.result is None
        await self.ended(Result.ABORTED, reason)
        return was_open

    def end(self, result: Result, reason: str) -> asyncio.Future[None]:
        """Begins to end it, unless something else has."""
        if self._ending is None:
            self.result, self.reason = result, reason
            self._ending = quiet(asyncio.ensure_future(self._end()))
        return self._ending

    async def ended(self, result: Result, reason: str) -> None:
        """Ends it, and waits until nothing of it is left."""
        await asyncio.shield(self.end(result, reason))

    async def has_ended(self) -> None:
        """Waits until it has ended, whoever ends it."""
        await self._over.wait()

    async def _commit(self) -> UpdateReport:
        try:
            self.report = await self.update.commit()
        except BaseException as error:
            self.error = error
            await self.ended(Result.FAILED, str(error))
            raise
        await self.ended(Result.SERVES, "")
        return self.report

    async def _end(self) -> None:
        self._let_lease_be()
        self._guard.cancel()
        try:
            if self._staging and not self._staging.done():
                self._staging.cancel()
                await asyncio.wait([self._staging])
            if self.result is not Result.SERVES:
                await self.update.drop()
        finally:
            self.update.instance.history.add(self._record())
            self._on_end()
            self._over.set()

    def _record(self) -> VersionRecord:
        update, report, staged = self.update, self.report, self.update.staged
        wanted, committed = update.wanted, self.result is Result.SERVES
        return VersionRecord(
            version=wanted.version, result=self.result or Result.FAILED, reason=self.reason,
            digest=staged.digest if staged else wanted.expected_digest,
            epoch=report.epoch if report and committed else 0,
            source=str(wanted.source), operator=self.operator,
            seconds_staged=staged.seconds if staged else 0.0,
            seconds_paused=report.seconds_paused if report else 0.0,
            pause_mode=wanted.pause.mode,
            bytes_changed=staged.bytes_changed if staged and committed else 0,
        )  # fmt: skip

    async def _follow(self) -> None:
        """An instance that ends, or fails, has no use for new weights."""
        state = await self.update.instance.lifecycle.left(*LIVE)
        if self._committing is None:
            self.end(Result.ABORTED, f"the instance is {state}")

    def _let_lease_be(self) -> None:
        if self._lease:
            self._lease.cancel()
            self._lease = None

    def _check_open(self) -> None:
        if self.result is not None:
            raise UpdateEnded(
                f"the update has ended: {self.reason or self.result}",
                session=self.name, result=str(self.result),
            )  # fmt: skip
