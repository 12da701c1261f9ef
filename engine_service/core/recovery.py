"""Brings back what lost ranks held, and spreads experts over more or fewer ranks. Plain Python.

    map → fresh ranks start ┐
        → plan ─ copies ────┤→ together, between two steps: Rejoin, Place, Capture, probe
               └ a parcel ──┘

Every unit is taken out of memory that the front passes on, block by block against the digest
that it must have: out of arenas of ranks that live, or out of a parcel that holds just what
nobody here has. Until the commit nothing has changed, and whatever fails leaves it so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from engine_service.core.expert_map import ExpertMap
from engine_service.core.expert_moves import known
from engine_service.core.expert_placing import fits, regrouped
from engine_service.core.formation import Formation
from engine_service.core.instance import Instance
from engine_service.core.member_messages import ReadUnits, Taken, TakeUnits, UnitsRead, Wanted
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)
from engine_service.core.messages import CheckProbe, Command, Done, Reply, Start
from engine_service.core.parcel import Parcels, fetch
from engine_service.core.rank_commands import Passed
from engine_service.core.rank_worker import RankWorker
from engine_service.core.ranks import RankGroup, close_all
from engine_service.core.recovery_plan import Holder, RecoveryPlan, plan
from engine_service.core.replies import quiet
from engine_service.errors import EngineError, RankDied, RecoveryFailed, WrongState
from relay_service.core.manifest import Manifest

RECOVERY, SCALING = "a recovery of experts", "a scaling of experts"
SLOWEST_BYTES_PER_SECOND = 50 << 20
"""A rank that takes units slower than so hangs."""
_log = logging.getLogger(__name__)
R = TypeVar("R", bound=Reply)


class Memory(NamedTuple):
    """Memory that units are taken from."""

    part: int
    manifest: Manifest
    descriptors: list[int]
    """The first one is of host memory with a header."""


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
        self._committing = False
        self._leaving: list[RankWorker] = []

    async def recover(
        self, options: RecoverOptions, on_progress: OnExpertProgress = lambda _: None
    ) -> ExpertReport:
        """Brings back what was lost; returns when all ranks serve it.

        Raises `WrongState` for an instance that has lost nothing, or whose weights somebody
        else changes; `RecoveryFailed` when no source gives what is missing; `RankDied`.
        """
        membership = self._instance.membership
        if membership is None or not membership.groups_lost:
            raise WrongState("no rank was lost", field="membership", expected="degraded")
        groups = known(self._instance).groups
        if options.replace or not fits(known(self._instance), groups):
            groups += membership.groups_lost
        return await self._only(RECOVERY, lambda: self._change(groups, options), on_progress)

    async def scale(
        self, groups: int, on_progress: OnExpertProgress = lambda _: None
    ) -> ExpertReport:
        """Spreads the experts over so many groups of ranks.

        Raises `InvalidRequest` where they have too few slots, `WrongState` while ranks are
        lost or where none can come or go, and what `recover` does.
        """
        membership, config = self._instance.membership, self._instance.config
        if not config.outlives:
            raise WrongState(
                "the ranks of this instance stay as they were started", field="on_rank_loss",
                hint="start it with --on-rank-loss degrade or recover, and --ep above 1",
            )  # fmt: skip
        if membership is None or membership.lost:
            raise WrongState("experts are lost: recover them first", field="membership")
        regrouped(_staying(known(self._instance), groups), groups)
        return await self._only(
            SCALING, lambda: self._change(groups, RecoverOptions()), on_progress
        )

    async def interrupt(self) -> None:
        """Ends what is under way, unless it is being committed: that comes to its own end."""
        work = self._work
        if work and not work.done():
            if not self._committing:
                work.cancel()
            await asyncio.wait([work])

    def close(self) -> None:
        """Lets go of what was salvaged."""
        while self.salvage:
            close_all(self.salvage.pop().descriptors)

    async def _only(
        self, name: str, change: Callable[[], Awaitable[ExpertReport]], tell: OnExpertProgress
    ) -> ExpertReport:
        """Has the turn; a caller who leaves doesn't end what has begun."""
        instance = self._instance
        if instance.turn.holder:
            raise instance.turn.busy()

        async def work() -> ExpertReport:
            async with instance.turn.taken(name):
                if not instance.lifecycle.serves:
                    raise WrongState(
                        f"{instance.identity.name} is {instance.lifecycle.state}: "
                        "its ranks change while it serves", field="state",
                        expected="READY", found=str(instance.lifecycle.state),
                    )  # fmt: skip
                try:
                    return await change()
                finally:
                    self.progress = None

        def note(progress: ExpertProgress) -> None:
            self.progress = progress
            tell(progress)

        self._note = note
        self._work = quiet(asyncio.ensure_future(work()))
        try:
            return await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if self._work.cancelled():
                raise RecoveryFailed("ranks were lost meanwhile") from None
            raise

    async def _change(self, groups: int, options: RecoverOptions) -> ExpertReport:
        """Has so many groups hold all experts."""
        began, report = time.monotonic(), ExpertReport()
        self._note(ExpertProgress(phase="planning"))
        self._formation.begin()
        present = known(self._instance)
        staying = _staying(present, groups)
        target = regrouped(staying, groups)
        self._note(ExpertProgress(phase="starting"))
        fresh = await self._started(target, staying.groups)
        try:
            report.ranks_started = len(fresh.workers)
            report.seconds_started = time.monotonic() - began
            planned = self._planned(target, staying, fresh)
            report.experts_moved = self._moved(planned, staying)
            await self._take(planned, staying, fresh, options, report)
            await self._commit(staying, target, fresh, report)
        except BaseException:
            await asyncio.gather(*(worker.kill() for worker in fresh.workers))
            await fresh.stop()
            raise
        report.seconds = time.monotonic() - began
        self._note(ExpertProgress(phase="done"))
        _log.info(
            "%d groups hold all experts: %d bytes pulled, %d copied, %d ranks started, in %.2f s",
            groups, report.bytes_pulled, report.bytes_copied, report.ranks_started, report.seconds,
        )  # fmt: skip
        return report

    async def _started(self, target: ExpertMap, first: int) -> RankGroup:
        """Starts the ranks of groups from the first new one on."""
        instance, parts = self._instance, self._formation.parts
        world = target.groups * parts
        fresh = await instance.ranks.fresh(world - first * parts)
        try:
            await fresh.bounded(
                fresh.allocate([self._start(target, rank) for rank in range(first * parts, world)]),
                "Start", instance.config.collective_timeout_seconds,
            )  # fmt: skip
        except BaseException:
            await fresh.stop()
            raise
        return fresh

    def _start(self, target: ExpertMap, rank: int) -> Start:
        config = msgspec.structs.replace(
            self._instance.told(rank), world_size=target.groups * self._formation.parts,
            expert_parallel_size=target.groups, joins_later=True, expert_map=dict(target.layers),
            redundant_experts=target.groups * target.slots - target.experts,
        )  # fmt: skip
        return Start(config, self._instance.files)

    @property
    def _memories(self) -> list[Memory]:
        """Everything that may be taken from here."""
        instance, parts = self._instance, self._formation.parts
        live = zip(instance.manifests, instance.ranks.descriptors, strict=True)
        found = [Memory(rank % parts, one, fds) for rank, (one, fds) in enumerate(live)]
        return found + self.salvage

    def _planned(self, target: ExpertMap, staying: ExpertMap, fresh: RankGroup) -> RecoveryPlan:
        parts, manifests = self._formation.parts, self._instance.manifests
        return plan(
            target,
            [*manifests[: staying.groups * parts], *(arena.manifest for arena in fresh.arenas)],
            [Holder(one.part, one.manifest) for one in self._memories],
            self._formation.known, parts,
        )  # fmt: skip

    def _moved(self, planned: RecoveryPlan, staying: ExpertMap) -> int:
        first = staying.groups * self._formation.parts
        taken = [(take.target, take.wanted) for take in planned.takes] + [*planned.wanted.items()]
        return sum(len(wanted) for target, wanted in taken if target < first)

    async def _take(
        self, planned: RecoveryPlan, staying: ExpertMap, fresh: RankGroup,
        options: RecoverOptions, report: ExpertReport,
    ) -> None:  # fmt: skip
        """Has every rank take what it shall hold, from here and from outside at the same time."""
        first, memories = staying.groups * self._formation.parts, self._memories

        async def take(target: int, memory: Memory, wanted: tuple[Wanted, ...]) -> int:
            command = TakeUnits(memory.manifest, wanted)
            group, rank = (self._instance.ranks, target) if target < first else (fresh, target - first)
            nbytes = _nbytes(memory.manifest, wanted)
            asked = {rank: Passed(command, memory.descriptors[0])}
            return (await self._bounded(group, asked, Taken, nbytes))[0].bytes_taken

        async def copy() -> None:
            self._note(ExpertProgress(phase="copying"))
            for one in planned.takes:
                report.bytes_copied += await take(one.target, memories[one.source], one.wanted)

        async def pull() -> None:
            began = time.monotonic()
            with await self._fetched(planned, options) as parcels:
                report.pulled = parcels.pulled
                report.seconds_pulled = time.monotonic() - began
                self._note(ExpertProgress(phase="staging", bytes_total=report.bytes_pulled))
                for target, wanted in planned.wanted.items():
                    part = target % self._formation.parts
                    manifest, descriptor = parcels.memory(part)
                    await take(target, Memory(part, manifest, [descriptor]), wanted)

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(copy())
                if planned.missing:
                    tasks.create_task(pull())
        except* EngineError as errors:
            raise errors.exceptions[0] from errors

    async def _fetched(self, planned: RecoveryPlan, options: RecoverOptions) -> Parcels:
        async def read(part: int, manifest: Manifest, descriptor: int) -> Manifest:
            config = self._instance.config
            command = ReadUnits(config.model, manifest, config.read_limit_bytes_per_second)
            asked = {part: Passed(command, descriptor)}
            nbytes = manifest.weight_bytes
            ranks = self._instance.ranks
            return (await self._bounded(ranks, asked, UnitsRead, nbytes))[0].manifest

        return await fetch(
            self._instance, planned.missing, read, source=options.source, on_progress=self._note
        )

    async def _bounded(
        self, group: RankGroup, asked: dict[int, Passed], kind: type[R], nbytes: int
    ) -> list[R]:
        command: Command = next(iter(asked.values())).command
        patience = self._instance.config.collective_timeout_seconds
        seconds = patience + nbytes / SLOWEST_BYTES_PER_SECOND
        return await group.bounded(group.some(asked, kind), type(command).__name__, seconds)

    async def _commit(
        self, staying: ExpertMap, target: ExpertMap, fresh: RankGroup, report: ExpertReport
    ) -> None:
        """Has all ranks serve what they took; not to be cancelled, see `interrupt`."""
        instance, ranks = self._instance, self._instance.ranks
        self._note(ExpertProgress(phase="committing"))
        self._committing = True
        try:
            async with instance.engine.between_steps():
                began = time.monotonic()
                ranks.check()
                leaving = self._joined(staying, fresh)
                try:
                    await self._formation.form(target)
                finally:
                    await self._left(leaving)
                self._note(ExpertProgress(phase="proving"))
                await self._prove()
                self._serve(fresh=report.ranks_started > 0)
                report.seconds_paused = time.monotonic() - began
        except RankDied:
            if instance.experts is staying:  # the fresh ones are no members yet
                for worker in ranks.workers[staying.groups * self._formation.parts :]:
                    worker.process.kill()
            raise
        finally:
            self._committing = False
        self.close()
        instance.attach_anew()
        await ranks.spares.fill(instance.config.spare_ranks)

    def _joined(self, staying: ExpertMap, fresh: RankGroup) -> list[Memory]:
        """Puts fresh ranks in the place of those that leave; returns what these held."""
        instance, ranks, parts = self._instance, self._instance.ranks, self._formation.parts
        first = staying.groups * parts
        held, reports = instance.manifests[first:], instance.load_reports
        instance.experts, instance.manifests = staying, instance.manifests[:first]
        instance.load_reports = [] if fresh.workers else reports[:first]
        parted = ranks.part(range(first, len(ranks.workers)))
        ranks.adopt(fresh)
        self._leaving = [one.worker for one in parted]
        return [
            Memory(number % parts, manifest, one.descriptors)
            for number, (one, manifest) in enumerate(zip(parted, held, strict=True))
        ]

    async def _left(self, held: list[Memory]) -> None:
        """Ends who has left; what they held is there until others hold it."""
        leaving, self._leaving = self._leaving, []
        await asyncio.gather(*(worker.kill() for worker in leaving))
        self.salvage += held

    def _serve(self, *, fresh: bool) -> None:
        """Goes on, with whole weights; fresh ranks have no KV of before."""
        instance, scheduler = self._instance, self._instance.engine.scheduler
        if fresh:
            scheduler.retract(list(scheduler.running))
            scheduler.pool.forget()
        instance.engine.set_degraded(False)
        instance.pauser.hold("")

    async def _prove(self) -> None:
        """Compares what all compute together with what they should; an instance must not err."""
        instance = self._instance
        try:
            await instance.ranks.in_time(
                CheckProbe(instance.probe), Done, instance.config.collective_timeout_seconds * 2
            )
        except RankDied:
            raise
        except EngineError as error:
            await instance.fail(f"recovered experts compute something else: {error.message}")
            raise


def _staying(experts: ExpertMap, groups: int) -> ExpertMap:
    """Returns the map without groups that are too many: the last ones leave."""
    return experts.without(range(groups, experts.groups))


def _nbytes(manifest: Manifest, wanted: Sequence[Wanted]) -> int:
    names = {one.unit for one in wanted}
    return sum(unit.nbytes for unit in manifest.units if unit.name in names)
