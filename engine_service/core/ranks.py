"""The rank workers of an instance, commanded together and in one order. Plain Python."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TypeVar

from engine_service import errors
from engine_service.core.messages import (
    Allocated,
    Command,
    CutOff,
    Moved,
    Reply,
    Row,
    Sampled,
    Step,
)
from engine_service.core.rank_worker import RankWorker, spawn
from relay_service.core.manifest import Manifest

R = TypeVar("R", bound=Reply)
T = TypeVar("T")


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

    @staticmethod
    async def spawn(ranks: int, threads: int) -> RankGroup:
        """Starts the worker processes; they import and wait."""
        shared = (os.memfd_create("seedrelay-rendezvous"),) if ranks > 1 else ()
        workers = [await spawn(rank, threads, shared) for rank in range(ranks)]
        return RankGroup(workers, *shared)

    async def all(self, commands: Sequence[Command], kind: type[R]) -> list[R]:
        """Gives each rank its command and returns their answers, by rank.

        Raises what went wrong first, once every rank has answered, or at once when a rank
        has died: the others would wait for it. Nothing is sent to a group that lost one.
        A caller that is cancelled does not disturb the order: its answers are still awaited.
        """
        return await asyncio.shield(quiet(asyncio.ensure_future(self._all(commands, kind))))

    async def _all(self, commands: Sequence[Command], kind: type[R]) -> list[R]:
        async with self._ordered:
            if self._broken:
                raise self._broken
            await self._send(commands)
            replies = [asyncio.ensure_future(worker.reply(kind)) for worker in self.workers]
            failures = await _failures(replies)
            self._broken = next((f for f in failures if isinstance(f, errors.RankDied)), None)
        if failures:
            # That others failed because of one is no news beside what happened to it.
            raise min(failures, key=lambda f: isinstance(f, errors.CollectiveFailed))
        return [reply.result() for reply in replies]

    async def _send(self, commands: Sequence[Command]) -> None:
        try:
            for worker, command in zip(self.workers, commands, strict=True):
                await worker.send(command)
        except errors.RankDied as error:
            self._broken = error
            raise

    async def same(self, command: Command, kind: type[R]) -> list[R]:
        """Gives every rank the same command."""
        return await self.all([command] * len(self.workers), kind)

    async def allocate(self, commands: Sequence[Command]) -> None:
        """Has the arenas allocated and takes their descriptors."""
        self.arenas = await self.all(commands, Allocated)
        for worker, arena in zip(self.workers, self.arenas, strict=True):
            self.descriptors.append(worker.channel.take_descriptors(arena.descriptors))

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

    async def step(self, rows: tuple[Row, ...]) -> Sampled:
        """Runs one step. Raises `RankDied` when the ranks did not sample the same tokens."""
        replies = await self.same(Step(rows), Sampled)
        if any(reply.tokens != replies[0].tokens for reply in replies):
            self._broken = errors.RankDied("the ranks sampled different tokens: weights differ")
            for worker in self.workers:
                worker.process.kill()  # whoever watches them ends the instance
            raise self._broken
        return replies[0]

    async def stage(self, commands: Sequence[Command], kind: type[R]) -> list[R]:
        """Gives each rank its command on the stream beside that of the steps."""
        raise NotImplementedError

    async def stage_same(self, command: Command, kind: type[R]) -> list[R]:
        """Gives every rank the same command on the stream beside that of the steps."""
        return await self.stage([command] * len(self.workers), kind)

    @property
    def staging_progress(self) -> list[tuple[int, int]]:
        """Bytes done and bytes in all of what is being staged, by rank."""
        raise NotImplementedError

    async def lend(self) -> list[list[int]]:
        """Returns descriptors of memory for staging, by rank; the caller owns them."""
        raise NotImplementedError

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


def quiet(work: asyncio.Future[T]) -> asyncio.Future[T]:
    """Returns work whose failure is no news when the one who waited for it has gone."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work


async def _failures(replies: Sequence[asyncio.Future[R]]) -> list[BaseException]:
    """Waits for all replies, or until a rank has died; returns the errors so far."""
    pending = set(replies)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        if any(isinstance(reply.exception(), errors.RankDied) for reply in done):
            for reply in pending:
                reply.cancel()
            break
    found = (reply.exception() for reply in replies if reply.done() and not reply.cancelled())
    return [error for error in found if error]
