"""Runs the steps of an instance, and decides what follows when it loses ranks. Plain Python.

    steps run → a rank dies, hangs or fails → who lives? → they meet anew → steps run
                                                 └ nobody, or it may not: FAILED

While that is decided no step runs: the steps have ended with the loss, and requests go back to
the queue. Where every expert has a replica left, or requests may do without some, service goes
on at once; else they are held. What was lost is brought back beside that, by `recovery`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from engine_service.core.formation import Formation
from engine_service.core.gathering import Memory
from engine_service.core.instance import Instance
from engine_service.core.member_messages import Beat
from engine_service.core.membership import MembershipState, RecoverOptions
from engine_service.core.messages import Done
from engine_service.core.ranks import close_all
from engine_service.core.recovery import Recovery
from engine_service.errors import EngineError, NotReady, RankDied, RanksLost
from relay_service.core.instance import State
from relay_service.core.logs import fields

RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 15.0
"""Between two tries to recover: at first, and at most; each may start processes."""
MOST_FALSE_ALARMS = 3
"""Times in a row that ranks may fail to meet though all of them live."""
_log = logging.getLogger(__name__)


class Supervisor:
    """Keeps one instance going."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._formation = Formation(instance)
        self.recovery = instance.recovery = Recovery(instance, self._formation)
        self._recovering: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Returns when the instance has failed for good."""
        try:
            while True:
                await self._survive(await self._until_lost())
        except EngineError as fatal:
            await self._give_up(fatal)
        except Exception as error:
            _log.exception("whoever keeps the instance going has failed")
            await self._give_up(EngineError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            await self._stop_recovering()
            self.recovery.close()

    async def _until_lost(self) -> RankDied:
        """Runs steps until a rank is lost; returns what to tell."""
        instance = self._instance
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(instance.engine.run()),
            asyncio.ensure_future(instance.ranks.died()),
            asyncio.ensure_future(self._beats()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
        steps, died, beats = waits
        if not died.cancelled():
            dead: RankDied = died.result()
            return dead
        try:
            (steps if beats.cancelled() else beats).result()
        except RankDied as error:
            if self._may_survive:
                return error
            instance.engine.fail_all(error)
        return await instance.ranks.died()  # which says why

    async def _beats(self) -> None:
        """Asks ranks that nobody asks anything whether they live. Raises `RankDied`.

        Also where one hangs in what needs no other rank, and all others have long answered. Has
        processes stand ready in the place of ranks, too: now and then, since to start them along
        with an instance, or right after a recovery, would hold up those who wait for it.
        """
        ranks, config = self._instance.ranks, self._instance.config
        beat = config.collective_timeout_seconds / 4
        while True:
            await asyncio.sleep(beat)
            if not self._may_survive:
                continue
            if not self.recovery.progress:
                await self._have_spares()
            now, since = time.monotonic(), ranks.awaited_since
            late = [worker for worker in ranks.workers if worker.owed]
            if late and since and now - since > config.patience_seconds:
                raise ranks.give_up("a rank does not answer what all others have answered", late)
            if now - ranks.quiet_since > beat and not ranks.ordered.locked():
                with suppress(RanksLost):  # others are members since
                    await ranks.in_time(Beat(), Done, config.patience_seconds)

    async def _have_spares(self) -> None:
        try:
            await self._instance.ranks.spares.fill(self._instance.config.spares)
        except OSError as error:  # a rank that is lost can be started when it is
            _log.warning("no process could be started to stand ready: %s", error)

    @property
    def _may_survive(self) -> bool:
        instance = self._instance
        elastic = instance.ranks.outlives and instance.experts is not None
        return elastic and instance.lifecycle.serves

    async def _survive(self, error: RankDied) -> None:
        """Has those that live go on. Raises what ends the instance."""
        instance, began = self._instance, time.monotonic()
        if not self._may_survive:
            raise error
        _log.error("a rank is lost: %s", error, extra=fields(phase="lost"))
        await self._stop_recovering()
        instance.interrupt_update("a rank was lost")
        instance.pauser.interrupt("a rank was lost")
        async with instance.engine.between_steps():  # a commit comes to its end
            if not self._may_survive:
                raise error
            self._formation.begin()
            await self._regroup(error)
        seconds = time.monotonic() - began
        _log.warning(
            "decided in %.2f s: %s", seconds, instance.membership, extra=fields(phase="regrouped")
        )
        instance.attach_anew()
        self._recovering = asyncio.create_task(self._recover())

    async def _regroup(self, error: RankDied) -> None:
        """Decides who lives, until those have met."""
        instance = self._instance
        alarms, reason = 0, str(error)
        while True:
            groups = await self._part()
            instance.recoveries.ranks_lost += groups * self._formation.parts
            alarms = 0 if groups else alarms + 1
            if alarms > MOST_FALSE_ALARMS:
                raise error
            experts = self._formation.experts
            if not experts.groups:
                raise RanksLost(f"no group of ranks is left: {reason}")
            routes = bool(experts.lost) and instance.config.lost_experts == "route"
            try:
                await self._formation.form(experts, routes=routes)
            except RankDied as another:
                reason = str(another)
                continue
            break
        lost = sum(map(len, experts.lost.values()))
        if not lost:  # others hold what was salvaged
            self.recovery.close()
        instance.engine.set_degraded(routes)
        instance.pauser.hold(f"{lost} experts are lost: {reason}" if lost and not routes else "")
        self._formation.say(reason, routes=routes)

    async def _part(self) -> int:
        """Ends groups that have lost a rank; returns how many of the map's these are."""
        instance, ranks, parts = self._instance, self._instance.ranks, self._formation.parts
        experts, count = self._formation.experts, len(ranks.workers)
        silent = set(await ranks.settle(instance.config.patience_seconds))
        lost = {rank // parts for rank in silent if rank // parts < experts.groups}
        # Groups behind the map's were about to become members, and did not.
        gone = [r for r in range(count) if r // parts in lost or r // parts >= experts.groups]
        sound = self._formation.sound
        held = {r: one for r, one in enumerate(instance.manifests) if sound and one.verified}
        parted = ranks.part(gone)
        instance.experts = experts.without(lost)
        instance.manifests = [one for r, one in enumerate(instance.manifests) if r not in gone]
        left = [one for r, one in enumerate(instance.load_reports) if r not in gone]
        instance.load_reports = left
        for rank, one in zip(gone, parted, strict=True):
            _log.warning("rank %d (process %d) is no member any more", rank, one.worker.pid)
            if rank in silent or rank not in held:
                close_all(one.descriptors)
            else:
                self.recovery.salvage.append(Memory(rank % parts, held[rank], one.descriptors))
        await asyncio.gather(*(one.worker.kill() for one in parted))
        return len(lost)

    async def _recover(self) -> None:
        """Brings back what was lost, if that is wanted; ends an instance that holds too long."""
        instance, config = self._instance, self._instance.config
        deadline, reason = time.monotonic() + config.recovery_deadline_seconds, "nobody was asked"
        pause = RETRY_SECONDS
        while self._may_survive and instance.membership and instance.membership.groups_lost:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if config.on_rank_loss == "recover":
                try:
                    async with asyncio.timeout(left):
                        await self.recovery.recover(RecoverOptions())
                except EngineError as error:  # when members are lost, it is decided anew
                    reason = error.message
                    self._formation.note(reason)
                    _log.warning("not recovered: %s", reason)
                except TimeoutError:
                    await self.recovery.interrupt()
                    break
                except Exception as error:  # noqa: BLE001 - there may be another try
                    reason = f"{type(error).__name__}: {error}"
                    _log.exception("not recovered")
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, MOST_RETRY_SECONDS)
        if self._holds:
            await self.recovery.interrupt()  # what is being committed comes to its end
        if self._holds:
            late = NotReady(f"lost experts did not come back in time: {reason}")
            await instance.fail(str(late))
            instance.pauser.fail(late)

    @property
    def _holds(self) -> bool:
        now = self._instance.membership
        return self._may_survive and now is not None and now.state is MembershipState.HELD

    async def _stop_recovering(self) -> None:
        task, self._recovering = self._recovering, None
        if task:
            task.cancel()
            await asyncio.wait([task])
        await self.recovery.interrupt()

    async def _give_up(self, error: EngineError) -> None:
        instance = self._instance
        _log.error("%s", error)
        if instance.lifecycle.state is not State.FAILED:  # else somebody knew more
            instance.lifecycle.to(State.FAILED, str(error))
        instance.pauser.fail(error)
        if instance.link:
            await instance.link.close()
