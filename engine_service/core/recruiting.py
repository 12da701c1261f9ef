"""One change of who holds which experts: ranks come, take what they need, and all serve.

    fresh ranks start → plan → gather → between two steps: Rejoin, Place, Capture, probe

Until the commit nothing has changed, and whatever fails leaves it so. Plain Python.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from engine_service.core.expert_map import ExpertMap
from engine_service.core.expert_placing import regrouped
from engine_service.core.formation import Formation
from engine_service.core.gathering import Gatherer, Memory
from engine_service.core.instance import Instance
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)
from engine_service.core.messages import Capture, Captured, CheckProbe, Done, Start
from engine_service.core.ranks import RankGroup
from engine_service.core.recovery_plan import Holder, RecoveryPlan, awaited, plan
from engine_service.errors import EngineError, NotReady, RankDied

PROVING_STEPS = 3
"""Of the probe: the prompt, whose tokens go to many experts, and two that are replayed. Each block
is known by its digest already; what is to be proven is that these ranks compute together."""
BUILD_SECONDS = 60.0
"""Longest time for fresh ranks to import what they are made of, build their models, capture."""


class Recruiting:
    """Has so many groups of ranks hold all experts, where some of the present ones stay."""

    def __init__(
        self, formation: Formation, salvage: list[Memory], groups: int, note: OnExpertProgress
    ) -> None:
        """`salvage` may be taken from, too; what ranks held that leave is added to it.

        Raises `InvalidRequest` where so many groups have too few slots.
        """
        self.report = ExpertReport()
        self.committing = False
        """Whether it must come to its end, which is near, a good one or not."""
        self._formation = formation
        self._instance: Instance = formation.instance
        self._salvage = salvage
        self._note = note
        self._staying = staying(formation.experts, groups)
        self._target = regrouped(self._staying, groups)
        self._first = self._staying.groups * formation.parts
        self._world = groups * formation.parts
        self._fresh = RankGroup([], outlives=True)

    async def run(self, options: RecoverOptions) -> ExpertReport:
        """Returns what was done. Raises what `Gatherer.gather` and `Formation.form` do."""
        began, report = time.monotonic(), self.report
        self._formation.begin()
        try:
            self._note(ExpertProgress(phase="starting"))
            self._fresh = await self._instance.ranks.fresh(self._world - self._first)
            memories = self._memories
            planned = self._planned(memories)
            gatherer = Gatherer(self._instance, self._fresh, self._first, self._note)
            await gatherer.gather(planned, memories, options, report, self._start())
            # A pass of theirs is captured without the others, who serve on or wait meanwhile.
            await self._fresh.in_time(Capture(), Captured, BUILD_SECONDS)
            await self._commit()
        except BaseException:
            await asyncio.gather(*(worker.kill() for worker in self._fresh.workers))
            raise
        finally:
            await self._fresh.stop()
        report.seconds = time.monotonic() - began
        return report

    async def _start(self) -> None:
        """Tells fresh ranks what they are; returns once they have room for what they take."""
        began = time.monotonic()
        starts = [self._told(rank) for rank in range(self._first, self._world)]
        seconds = self._instance.config.collective_timeout_seconds
        await self._fresh.allocate(starts, seconds=seconds)
        self.report.ranks_started = len(starts)
        self.report.seconds_started = time.monotonic() - began

    def _told(self, rank: int) -> Start:
        target = self._target
        config = msgspec.structs.replace(
            self._instance.told(rank), world_size=self._world,
            expert_parallel_size=target.groups, expert_map=dict(target.layers), joins_later=True,
            redundant_experts=target.groups * target.slots - target.experts,
        )  # fmt: skip
        return Start(config, self._instance.files)

    @property
    def _memories(self) -> list[Memory]:
        """Everything here that may be taken from."""
        instance, parts = self._instance, self._formation.parts
        live = zip(instance.manifests, instance.ranks.descriptors, strict=True)
        found = [Memory(rank % parts, one, fds) for rank, (one, fds) in enumerate(live)]
        return found + self._salvage

    def _planned(self, memories: list[Memory]) -> RecoveryPlan:
        known, parts = self._formation.known, self._formation.parts
        present = self._instance.manifests[: self._first]
        fresh = [awaited(self._target, known, r, parts) for r in range(self._first, self._world)]
        holders = [Holder(one.part, one.manifest) for one in memories]
        planned = plan(self._target, [*present, *fresh], holders, known, parts)
        taken = [*((one.target, one.wanted) for one in planned.takes), *planned.wanted.items()]
        moved = sum(len(wanted) for target, wanted in taken if target < self._first)
        self.report.experts_moved = moved
        return planned

    async def _commit(self) -> None:
        """Has all ranks serve what they took."""
        instance, ranks = self._instance, self._instance.ranks
        self._note(ExpertProgress(phase="committing"))
        self.committing = True
        try:
            async with instance.engine.between_steps():
                began = time.monotonic()
                ranks.check()
                await self._take_over()
                self._note(ExpertProgress(phase="proving"))
                await self._prove()
                self._serve()
                self.report.seconds_paused = time.monotonic() - began
        except RankDied:
            if instance.experts is self._staying:  # the fresh ones are no members yet
                for worker in ranks.workers[self._first :]:
                    worker.process.kill()
            raise

    async def _take_over(self) -> None:
        """Puts fresh ranks in the place of those that leave, and has all meet."""
        instance, ranks, first = self._instance, self._instance.ranks, self._first
        held, fresh = instance.manifests[first:], [one.manifest for one in self._fresh.arenas]
        if fresh:  # with no KV of before, whatever becomes of this
            instance.engine.scheduler.retract(list(instance.engine.scheduler.running))
            instance.engine.scheduler.pool.forget()
        instance.manifests = instance.manifests[:first] + fresh
        instance.load_reports = [] if fresh else instance.load_reports[:first]
        instance.experts = self._staying
        leaving = ranks.part(range(first, len(ranks.workers)))
        ranks.adopt(self._fresh)
        try:
            await self._formation.form(self._target)
        except RankDied:
            raise
        except EngineError as error:  # of whom, nobody says: all that live meet anew
            raise ranks.give_up(error.message, ranks.workers[first:]) from error
        finally:
            parts = self._formation.parts
            for rank, (one, manifest) in enumerate(zip(leaving, held, strict=True), first):
                await one.worker.kill()
                # Until others hold it, it is there.
                self._salvage.append(Memory(rank % parts, manifest, one.descriptors))

    async def _prove(self) -> None:
        """Compares what all compute together with what they should."""
        instance = self._instance
        seconds = 2 * instance.config.collective_timeout_seconds
        try:
            command = CheckProbe(instance.probe, PROVING_STEPS)
            await instance.ranks.in_time(command, Done, seconds)
        except RankDied:
            raise
        except EngineError as error:
            reason = f"recovered experts compute something else: {error.message}"
            await instance.fail(reason)
            instance.pauser.fail(NotReady(reason))  # no step shall run with them
            raise

    def _serve(self) -> None:
        """Goes on with whole weights."""
        instance = self._instance
        instance.engine.set_degraded(False)
        instance.pauser.hold("")
        self._formation.say()


def staying(experts: ExpertMap, groups: int) -> ExpertMap:
    """Returns the map without groups that are too many: the last ones leave."""
    return experts.without(range(groups, experts.groups))
