"""Brings back what lost ranks held, and spreads experts over more or fewer ranks. Plain Python.

Who asks, and whose turn it is; how it is done stands in `recruiting`.
"""

from __future__ import annotations

import asyncio
import logging

from engine_service.core.expert_placing import fits, regrouped
from engine_service.core.formation import Formation
from engine_service.core.gathering import Memory
from engine_service.core.instance import Instance
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)
from engine_service.core.ranks import close_all
from engine_service.core.recovery_tally import Change
from engine_service.core.recruiting import Recruiting, staying
from engine_service.core.replies import quiet
from engine_service.errors import RecoveryFailed, WrongState
from relay_service.core.logs import fields

_WORDS = {Change.RECOVER: "a recovery of experts", Change.SCALE: "a scaling of experts"}
_log = logging.getLogger(__name__)


class Recovery:
    """The changes of one instance's membership that somebody wants, one at a time."""

    def __init__(self, instance: Instance, formation: Formation) -> None:
        self.progress: ExpertProgress | None = None
        """How far the present one is."""
        self.salvage: list[Memory] = []
        """What ended mates of lost ranks held."""
        self._instance = instance
        self._formation = formation
        self._work: asyncio.Future[ExpertReport] | None = None
        self._present: Recruiting | None = None

    async def recover(
        self, options: RecoverOptions, on_progress: OnExpertProgress = lambda _: None
    ) -> ExpertReport:
        """Brings back what was lost; returns when all ranks serve it.

        Raises `WrongState` for an instance that has lost nothing, `UpdateBusy` while somebody
        else changes its weights, `RecoveryFailed` when no source gives what is missing; then
        nothing has changed. `RankDied` when ranks are lost again.
        """
        membership = self._instance.membership
        if membership is None or not membership.groups_lost:
            raise WrongState("no rank was lost", field="membership", expected="degraded")
        experts = self._formation.experts
        groups = experts.groups
        if options.replace or not fits(experts, groups):
            groups += membership.groups_lost
        return await self._only(Change.RECOVER, groups, options, on_progress)

    async def scale(
        self, groups: int, on_progress: OnExpertProgress = lambda _: None
    ) -> ExpertReport:
        """Spreads the experts over so many groups of ranks.

        Raises `InvalidRequest` where they have too few slots, `WrongState` while experts are
        lost or where no rank can come or go, and what `recover` does.
        """
        membership = self._instance.membership
        if not self._instance.config.outlives:
            raise WrongState(
                "the ranks of this instance stay as they were started", field="on_rank_loss",
                hint="start it with --on-rank-loss degrade or recover, and --ep above 1",
            )  # fmt: skip
        if membership is None or membership.lost:
            raise WrongState("experts are lost: recover them first", field="membership")
        regrouped(staying(self._formation.experts, groups), groups)
        return await self._only(Change.SCALE, groups, RecoverOptions(), on_progress)

    async def interrupt(self) -> None:
        """Ends what is under way, unless it is being committed: that comes to its own end."""
        work = self._work
        if work and not work.done():
            if not (self._present and self._present.committing):
                work.cancel()
            await asyncio.wait([work])

    def close(self) -> None:
        """Lets go of what was salvaged."""
        while self.salvage:
            close_all(self.salvage.pop().descriptors)

    async def _only(
        self, what: Change, groups: int, options: RecoverOptions, tell: OnExpertProgress
    ) -> ExpertReport:
        """Has the turn; a caller who leaves doesn't end what has begun."""
        turn = self._instance.turn
        if turn.holder or (self._work and not self._work.done()):
            raise turn.busy()

        def note(progress: ExpertProgress) -> None:
            if self.progress is None or progress.phase != self.progress.phase:
                _log.info(
                    "%s: %s", _WORDS[what], progress.phase, extra=fields(phase=progress.phase)
                )
            self.progress = progress
            tell(progress)

        work = quiet(asyncio.ensure_future(self._counted(what, groups, options, note)))
        self._work, self._present = work, None
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise RecoveryFailed("ranks were lost meanwhile") from None
            raise

    async def _counted(
        self, what: Change, groups: int, options: RecoverOptions, note: OnExpertProgress
    ) -> ExpertReport:
        report, instance = None, self._instance
        async with instance.turn.taken(_WORDS[what]):
            try:
                note(ExpertProgress(phase="planning"))
                self._check_serves()
                self._present = Recruiting(self._formation, self.salvage, groups, note)
                report = await self._present.run(options)
                note(ExpertProgress(phase="done"))
            finally:
                self.progress = None
                instance.recoveries.ended(what, report)
        self.close()
        instance.attach_anew()
        _log.info(
            "%s: %d units, %d bytes from outside, %d bytes copied, %d ranks started, %.2f s, "
            "of them %.2f s paused", _WORDS[what], len(report.pulled), report.bytes_pulled,
            report.bytes_copied, report.ranks_started, report.seconds, report.seconds_paused,
            extra=fields(bytes_pulled=report.bytes_pulled),
        )  # fmt: skip
        return report

    def _check_serves(self) -> None:
        lifecycle, name = self._instance.lifecycle, self._instance.identity.name
        if not lifecycle.serves:
            raise WrongState(
                f"{name} is {lifecycle.state}: its ranks change while it serves",
                field="state", expected="READY", found=str(lifecycle.state),
            )  # fmt: skip
