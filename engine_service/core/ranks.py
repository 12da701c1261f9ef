"""The rank workers of an instance, commanded together and in one order. Plain Python."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from engine_service import errors
from engine_service.core.messages import (
    Allocated,
    Command,
    CutOff,
    Moved,
    Reply,
    Restore,
    Restored,
    Row,
    Sampled,
    Step,
)
from engine_service.core.rank_worker import RankWorker, spawn
from engine_service.core.replies import cause, failures_of, quiet
from engine_service.core.staging_streams import StagingStreams
from engine_service.core.update_messages import Trimmed, TrimMemory
from relay_service.core.manifest import Manifest

R = TypeVar("R", bound=Reply)


class RankGroup:
    """All ranks of an instance. Every command goes to all of them, in one order.

    A command that needs no other rank (loading, sealing) may fail on one alone: the others
    stay in step. One that fails on one rank before they have met costs the others the
    collective timeout; then they answer `CollectiveFailed` and end, and so does the group.
    No next command is sent before all have answered, so collectives never pair wrongly.
    """

    def __init__(self, workers: list[RankWorker], rendezvous_fd: int = -1) -> None:
        """`rendezvous_fd` is the memory file in which the workers meet; the group owns it."""
        self.workers = workers
        self._rendezvous_fd = rendezvous_fd
        self._broken: errors.RankDied | None = None
        self._lost = False
        self.arenas: list[Allocated] = []
        self.descriptors: list[list[int]] = []
        """Of each rank's arena; the first one carries header and seal."""
        self._ordered = asyncio.Lock()
        self._staging = StagingStreams(workers)

    @staticmethod
    async def spawn(ranks: int, threads: int) -> RankGroup:
        """Starts the worker processes; they import and wait."""
        shared = (os.memfd_create("seedrelay-rendezvous"),) if ranks > 1 else ()
        workers = [await spawn(rank, threads, shared) for rank in range(ranks)]
        return RankGroup(workers, *shared)

    async def all(
        self, commands: Sequence[Command], kind: type[R], descriptors: Sequence[int] = ()
    ) -> list[R]:
        """Gives each rank its command and returns their answers, by rank.

        Raises what went wrong first, once every rank has answered, or at once when a rank
        has died: the others would wait for it. Nothing is sent to a group that lost one.
        A caller that is cancelled does not disturb the order: its answers are still awaited.
        Of `descriptors`, if there are any, each rank gets one; they stay the caller's.
        """
        running = asyncio.ensure_future(self._all(commands, kind, list(map(os.dup, descriptors))))
        return await asyncio.shield(quiet(running))

    async def _all(
        self, commands: Sequence[Command], kind: type[R], descriptors: list[int]
    ) -> list[R]:
        async with self._ordered:
            try:
                self._check()
                await self._send(commands, descriptors)
            finally:
                _close(descriptors)
            replies = [asyncio.ensure_future(worker.reply(kind)) for worker in self.workers]
            failures = await failures_of(replies)
            died = next((f for f in failures if isinstance(f, errors.RankDied)), None)
            self._broken = self._broken or died  # who gave it up has said why already
        if failures:
            raise cause(failures)
        return [reply.result() for reply in replies]

    def _check(self) -> None:
        """Raises what ended the group, on whichever stream."""
        if ended := self._broken or self._staging.broken:
            raise ended

    async def _send(self, commands: Sequence[Command], descriptors: list[int]) -> None:
        try:
            for rank, (worker, command) in enumerate(zip(self.workers, commands, strict=True)):
                await worker.send(command, *descriptors[rank : rank + 1])
        except errors.RankDied as error:
            self._broken = error
            raise

    async def same(self, command: Command, kind: type[R]) -> list[R]:
        """Gives every rank the same command."""
        return await self.all([command] * len(self.workers), kind)

    async def stage(self, commands: Sequence[Command], kind: type[R]) -> list[R]:
        """Gives each rank a command that stages weights; like `all`, while steps go on.

        A collective that failed ends the update, not the group. A caller that is cancelled
        gives up: what was staged is dropped.
        """
        self._check()
        return await self._staging.all(commands, kind)

    async def stage_same(self, command: Command, kind: type[R]) -> list[R]:
        """Gives every rank the same command that stages weights."""
        return await self.stage([command] * len(self.workers), kind)

    async def lend(self) -> list[list[int]]:
        """Has every rank make memory to stage in; returns the descriptors, which the caller owns.

        Raises what `stage` does.
        """
        self._check()
        return await self._staging.lend()

    @property
    def staging_progress(self) -> list[tuple[int, int]]:
        """Bytes done, and in all, of what each rank stages."""
        return [worker.staging.progress for worker in self.workers]

    async def allocate(self, commands: Sequence[Command]) -> None:
        """Has the arenas allocated and takes their descriptors."""
        self.arenas = await self.all(commands, Allocated)
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
            _close(self.descriptors[rank])
            self.descriptors[rank] = fresh
        return [reply.manifest for reply in moved]

    async def trim_memory(self) -> tuple[int, int]:
        """Has devices take unused memory back; returns the bytes reserved before and after."""
        replies = await self.same(TrimMemory(), Trimmed)
        return sum(r.bytes_before for r in replies), sum(r.bytes_after for r in replies)

    async def step(self, rows: tuple[Row, ...]) -> Sampled:
        """Runs one step. Raises `RankDied` when the ranks did not sample the same tokens."""
        replies = await self.same(Step(rows), Sampled)
        if any(reply.tokens != replies[0].tokens for reply in replies):
            raise self._give_up("the ranks sampled different tokens: weights differ")
        for rank, reply in enumerate(replies):
            if reply.page_kind:
                arena = msgspec.structs.replace(self.arenas[rank], page_kind=reply.page_kind)
                self.arenas[rank] = arena
        return replies[0]

    async def in_time(self, command: Command, kind: type[R], seconds: float) -> list[R]:
        """Gives every rank the same command, and ends them all when one takes longer.

        For what cannot be left half done. Raises `RankDied` then.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self.same(command, kind)
        except TimeoutError:
            name = type(command).__name__
            raise self._give_up(f"{name} took a rank longer than {seconds:g} s") from None

    def _give_up(self, reason: str) -> errors.RankDied:
        self._broken = errors.RankDied(reason)
        for worker in self.workers:
            worker.process.kill()  # whoever watches them ends the instance
        return self._broken

    @property
    def lost(self) -> bool:
        """Whether a rank has ended although nobody asked it to."""
        return self._lost

    async def died(self) -> errors.RankDied:
        """Waits until a worker ends by itself; returns what to tell."""
        waits = [asyncio.ensure_future(worker.process.wait()) for worker in self.workers]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        # The rank that a signal ended comes before those that ended because of it.
        rank = min(map(waits.index, done), key=lambda rank: waits[rank].result())
        self._lost = True
        worker, status = self.workers[rank], waits[rank].result()
        told = self._broken and (status >= 0 or "rank" not in self._broken.details)
        reason = f": {self._broken}" if told else ""
        return errors.RankDied(
            f"rank {rank} (process {worker.pid}) has died with status {status}{reason}",
            rank=str(rank),
        )

    async def stop(self) -> None:
        """Ends every worker and lets go of the arenas."""
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        while self.descriptors:
            _close(self.descriptors.pop())
        if self._rendezvous_fd >= 0:
            os.close(self._rendezvous_fd)
            self._rendezvous_fd = -1


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
