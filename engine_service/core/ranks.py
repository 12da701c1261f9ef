"""The rank workers of an instance: who they are, and what lies in their arenas. Plain Python."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from engine_service import errors
from engine_service.core.messages import Allocated, Command, CutOff, Moved, Reply, Restore, Restored
from engine_service.core.rank_commands import RankCommands
from engine_service.core.rank_worker import RankWorker, spawn
from engine_service.core.spare_ranks import SpareRanks
from engine_service.core.staging_streams import StagingStreams
from engine_service.core.step_messages import Row, Sampled, Step
from engine_service.core.update_messages import Trimmed, TrimMemory
from relay_service.core.manifest import Manifest

R = TypeVar("R", bound=Reply)


class Parted(NamedTuple):
    """A rank that belongs to the group no longer, and its arena."""

    worker: RankWorker
    descriptors: list[int]


class RankGroup(RankCommands):
    """All ranks of an instance. Every command goes to all of them, in one order."""

    def __init__(
        self, workers: list[RankWorker], rendezvous_fd: int = -1, *, outlives: bool = False,
        spares: SpareRanks | None = None,
    ) -> None:  # fmt: skip
        """`rendezvous_fd` is the memory file in which the workers meet; the group owns it.

        Ranks that `outlives` may lose each other: see `settle` and `part`.
        """
        super().__init__(workers, outlives=outlives)
        self.spares = spares or SpareRanks(0)
        self._rendezvous_fd = rendezvous_fd
        self._lost = False
        self._others = asyncio.Event()
        """Set when other ranks than before are in the group."""
        self.arenas: list[Allocated] = []
        self.descriptors: list[list[int]] = []
        """Of each rank's arena; the first one carries header and seal."""

    @staticmethod
    async def spawn(ranks: int, threads: int, *, outlives: bool = False) -> RankGroup:
        """Starts the worker processes; they import and wait."""
        shared = (os.memfd_create("seedrelay-rendezvous"),) if ranks > 1 else ()
        workers = [await spawn(rank, threads, shared) for rank in range(ranks)]
        spares = SpareRanks(threads, shared)
        return RankGroup(workers, *shared, outlives=outlives, spares=spares)

    async def stage(self, commands: Sequence[Command], kind: type[R]) -> list[R]:
        """Gives each rank a command that stages weights; like `all`, while steps go on.

        A collective that failed ends the update, not the group. A caller that is cancelled
        gives up: what was staged is dropped.
        """
        self.check()
        return await self.staging.all(commands, kind)

    async def stage_same(self, command: Command, kind: type[R]) -> list[R]:
        """Gives every rank the same command that stages weights."""
        return await self.stage([command] * len(self.workers), kind)

    async def lend(self) -> list[list[int]]:
        """Has every rank make memory to stage in; returns the descriptors, which the caller owns.

        Raises what `stage` does.
        """
        self.check()
        return await self.staging.lend()

    @property
    def staging_progress(self) -> list[tuple[int, int]]:
        """Bytes done, and in all, of what each rank stages."""
        return [worker.staging.progress for worker in self.workers]

    async def allocate(self, commands: Sequence[Command], *, seconds: float | None = None) -> None:
        """Has the arenas allocated and takes their descriptors."""
        self.arenas = await self.all(commands, Allocated, seconds=seconds)
        for worker, arena in zip(self.workers, self.arenas, strict=True):
            self.descriptors.append(worker.channel.take_descriptors(arena.descriptors))

    async def restore(
        self, manifests: Sequence[Manifest], descriptors: Sequence[int]
    ) -> list[Restored]:
        """Has each rank copy what matches of a former arena; the descriptors stay the caller's."""
        return await self.all([Restore(m) for m in manifests], Restored, descriptors)

    async def cut_off(self) -> list[Manifest]:
        """Moves every arena to fresh memory, away from whoever still maps the old.

        Returns the manifests of what lies there now.
        """
        moved = await self.same(CutOff(), Moved)
        for rank, worker in enumerate(self.workers):
            fresh = worker.channel.take_descriptors(len(self.descriptors[rank]))
            close_all(self.descriptors[rank])
            self.descriptors[rank] = fresh
        return [reply.manifest for reply in moved]

    async def trim_memory(self, seconds: float) -> tuple[int, int]:
        """Has devices take unused memory back; returns the bytes reserved before and after."""
        replies = await self.in_time(TrimMemory(), Trimmed, seconds)
        return sum(r.bytes_before for r in replies), sum(r.bytes_after for r in replies)

    async def step(self, rows: tuple[Row, ...]) -> Sampled:
        """Runs one step. Raises `RankDied` when the ranks did not sample the same tokens."""
        replies = await self.same(Step(rows), Sampled)
        if any(reply.tokens != replies[0].tokens for reply in replies):
            raise self.give_up("the ranks sampled different tokens: weights differ")
        for rank, reply in enumerate(replies):
            if reply.page_kind:
                arena = msgspec.structs.replace(self.arenas[rank], page_kind=reply.page_kind)
                self.arenas[rank] = arena
        return replies[0]

    @property
    def lost(self) -> bool:
        """Whether a rank has ended although nobody asked it to, or none is left."""
        return self._lost or not self.workers

    async def died(self) -> errors.RankDied:
        """Waits until a worker ends by itself; returns what to tell."""
        done: list[int] = []
        while not done:
            workers, others = self.workers, asyncio.ensure_future(self._others.wait())
            waits = [asyncio.ensure_future(worker.process.wait()) for worker in workers]
            try:
                await asyncio.wait([others, *waits], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in (others, *waits):
                    wait.cancel()
            if workers is self.workers:  # else some of these were let go
                ended = [wait.done() and not wait.cancelled() for wait in waits]
                done = [rank for rank, over in enumerate(ended) if over]
        # The rank that a signal ended comes before those that ended because of it.
        rank = min(done, key=lambda rank: waits[rank].result())
        self._lost = True
        worker, status = workers[rank], waits[rank].result()
        told = self.broken and (status >= 0 or "rank" not in self.broken.details)
        reason = f": {self.broken}" if told else ""
        return errors.RankDied(
            f"rank {rank} (process {worker.pid}) has died with status {status}{reason}",
            rank=str(rank),
        )

    def part(self, leaving: Iterable[int]) -> list[Parted]:
        """Goes on without some ranks, which are returned; the others get new numbers.

        No command may be in work, and none be owed an answer.
        """
        gone, ranks = set(leaving), range(len(self.workers))
        parted = [Parted(self.workers[r], self.descriptors[r]) for r in sorted(gone)]
        stay = [rank for rank in ranks if rank not in gone]
        self.arenas = [self.arenas[rank] for rank in stay]
        self.descriptors = [self.descriptors[rank] for rank in stay]
        self._are([self.workers[rank] for rank in stay])
        return parted

    def adopt(self, others: RankGroup) -> None:
        """Takes in the ranks of another group, which has none then, behind its own."""
        self.arenas += others.arenas
        self.descriptors += others.descriptors
        self._are([*self.workers, *others.workers])
        others.workers, others.arenas, others.descriptors = [], [], []

    async def fresh(self, ranks: int) -> RankGroup:
        """Returns a group of its own, of so many new processes that could join this one."""
        first, fresh = len(self.workers), RankGroup([], outlives=True)
        try:
            for number in range(ranks):
                fresh.workers.append(await self.spares.take(first + number))
        except BaseException:
            await fresh.stop()
            raise
        return RankGroup(fresh.workers, outlives=True)

    async def stop(self) -> None:
        """Ends every worker and lets go of the arenas."""
        try:
            await asyncio.gather(*(worker.stop() for worker in self.workers), self.spares.stop())
        finally:
            while self.descriptors:
                close_all(self.descriptors.pop())
            if self._rendezvous_fd >= 0:
                os.close(self._rendezvous_fd)
                self._rendezvous_fd = -1

    def _are(self, workers: list[RankWorker]) -> None:
        self.workers = workers
        for rank, worker in enumerate(workers):
            worker.call(rank)
        self.staging, self.broken, self._lost = StagingStreams(workers), None, False
        others, self._others = self._others, asyncio.Event()
        others.set()


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors."""
    for fd in descriptors:
        os.close(fd)
