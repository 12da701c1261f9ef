"""Commands to the ranks of an instance, in one order. Plain Python."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from engine_service import errors
from engine_service.core.messages import Command, Reply
from engine_service.core.rank_worker import RankWorker
from engine_service.core.replies import cause, failures_of, let_go, quiet
from engine_service.core.staging_streams import StagingStreams

R = TypeVar("R", bound=Reply)


class Passed(NamedTuple):
    """A command, and a descriptor that goes along."""

    command: Command
    descriptor: int
    """Stays the caller's."""


class RankCommands:
    """The workers, and what they are told.

    A command that needs no other rank (loading, sealing) may fail on one alone: the others
    stay in step. One that fails on one rank before they have met costs the others the
    collective timeout; then they answer `CollectiveFailed`. No next command is sent before all
    have answered, so collectives never pair wrongly, and none at all to a group that has lost
    a rank: it has ended, unless its ranks outlive each other.
    """

    def __init__(self, workers: list[RankWorker], *, outlives: bool) -> None:
        """Ranks that `outlives` may lose each other, and go on when that is settled."""
        self.workers = workers
        self.outlives = outlives
        self.staging = StagingStreams(workers)
        self.broken: errors.RankDied | None = None
        """Why no command is sent any more."""
        self.ordered = asyncio.Lock()
        """Held while a command is in work."""
        self.quiet_since = time.monotonic()
        """When all ranks had answered last."""
        self.awaited_since: float | None = None
        """When the first of several ranks had answered a command that others still owe."""

    async def all(
        self, commands: Sequence[Command], kind: type[R], descriptors: Sequence[int] = (), *,
        seconds: float | None = None,
    ) -> list[R]:  # fmt: skip
        """Gives each rank its command and returns their answers, by rank.

        Raises what went wrong first, once every rank has answered, or at once when a rank
        has died: the others would wait for it. Nothing is sent to a group that lost one, nor
        where other ranks are in it by then (`RanksLost`).
        A caller that is cancelled does not disturb the order: its answers are still awaited.
        Of `descriptors`, if there are any, each rank gets one; they stay the caller's.
        Who takes longer than `seconds`, once it was its turn, is ended: see `all_in_time`.
        """
        passed = {
            rank: Passed(command, os.dup(descriptors[rank]) if descriptors else -1)
            for rank, command in enumerate(commands)
        }
        return await self._shielded(passed, kind, seconds)

    async def some(
        self, commands: Mapping[int, Passed], kind: type[R], *, seconds: float | None = None
    ) -> list[R]:
        """Gives some ranks a command that needs no other rank; like `all`."""
        passed = {
            rank: Passed(command, os.dup(descriptor) if descriptor >= 0 else -1)
            for rank, (command, descriptor) in sorted(commands.items())
        }
        return await self._shielded(passed, kind, seconds)

    async def same(self, command: Command, kind: type[R]) -> list[R]:
        """Gives every rank the same command."""
        return await self.all([command] * len(self.workers), kind)

    async def in_time(self, command: Command, kind: type[R], seconds: float) -> list[R]:
        """Gives every rank the same command; see `all_in_time`."""
        return await self.all_in_time([command] * len(self.workers), kind, seconds)

    async def all_in_time(
        self, commands: Sequence[Command], kind: type[R], seconds: float
    ) -> list[R]:
        """Gives each rank its command, and ends whoever takes longer.

        For what cannot be left half done. Raises `RankDied` then. Ranks that do not outlive
        each other end all.
        """
        return await self.all(commands, kind, seconds=seconds)

    def give_up(self, reason: str, late: Iterable[RankWorker] | None = None) -> errors.RankDied:
        """Ends ranks, all unless it is said which ones; returns what to tell."""
        self.broken = errors.RankDied(reason)
        for worker in self.workers if late is None else late:
            worker.process.kill()  # whoever watches them ends the instance, or goes on
        return self.broken

    def check(self) -> None:
        """Raises what ended the group, on whichever stream."""
        if ended := self.broken or self.staging.broken:
            raise ended

    async def settle(self, seconds: float) -> list[int]:
        """Waits until all have answered what they still owe; returns those that are lost.

        Whoever has died is, and whoever does not answer in time: it is ended, so that it
        cannot come back. Afterwards the others owe nothing.
        """
        staging = asyncio.ensure_future(
            self.staging.abandon(self.broken or errors.RanksLost("ranks were lost"))
        )
        await asyncio.wait([staging], timeout=seconds)
        await self._take_turn(seconds)
        settling = [asyncio.ensure_future(worker.settled()) for worker in self.workers]
        try:
            await asyncio.wait(settling, timeout=seconds)
            lost = []
            for rank, (worker, done) in enumerate(zip(self.workers, settling, strict=True)):
                if not done.done() or done.exception() or worker.has_ended:
                    await worker.kill()
                    lost.append(rank)
            return lost
        finally:
            await let_go([staging, *settling])
            self.ordered.release()

    async def _take_turn(self, seconds: float) -> None:
        """Waits for the command in work, and ends ranks that get no further with it.

        Whoever gave it may have left, and then nobody else bounds it.
        """
        while True:
            before = [worker.progress for worker in self.workers]
            try:
                async with asyncio.timeout(seconds):
                    await self.ordered.acquire()
            except TimeoutError:
                if before == [worker.progress for worker in self.workers]:
                    self.give_up("it got no further", [one for one in self.workers if one.owed])
            else:
                return

    async def _shielded(
        self, passed: Mapping[int, Passed], kind: type[R], seconds: float | None
    ) -> list[R]:
        running = asyncio.ensure_future(self._ask(passed, kind, self.workers, seconds))
        return await asyncio.shield(quiet(running))

    async def _ask(
        self, passed: Mapping[int, Passed], kind: type[R], workers: list[RankWorker],
        seconds: float | None,
    ) -> list[R]:  # fmt: skip
        async with self.ordered:
            replies: list[asyncio.Future[R]] = []
            try:
                async with asyncio.timeout(seconds):
                    await self._send(passed, workers)
                    replies += [asyncio.ensure_future(workers[r].reply(kind)) for r in passed]
                    with self._first_of(replies):
                        failures = await failures_of(replies)
            except TimeoutError:
                name = type(next(iter(passed.values())).command).__name__
                late = [one for one in workers if not self.outlives or one.owed]
                raise self.give_up(f"{name} took a rank longer than {seconds:g} s", late) from None
            finally:
                await let_go(replies)
            died = next((f for f in failures if isinstance(f, errors.RankDied)), None)
            self.broken = self.broken or died  # who gave it up has said why already
            self.quiet_since = time.monotonic()
        if failures:
            raise cause(failures)
        return [reply.result() for reply in replies]

    @contextmanager
    def _first_of(self, replies: Sequence[asyncio.Future[R]]) -> Iterator[None]:
        """Takes note of when the first one comes."""

        def note(_: object) -> None:
            self.awaited_since = self.awaited_since or time.monotonic()

        for reply in replies:
            reply.add_done_callback(note)
        try:
            yield
        finally:
            for reply in replies:
                reply.remove_done_callback(note)
            self.awaited_since = None

    async def _send(self, passed: Mapping[int, Passed], workers: list[RankWorker]) -> None:
        try:
            self.check()
            if workers is not self.workers:
                raise errors.RanksLost("other ranks compute together by now")
            for rank, (command, descriptor) in passed.items():
                along = () if descriptor < 0 else (descriptor,)
                try:
                    await workers[rank].send(command, *along)
                except errors.RankDied as error:
                    self.broken = error
                    raise
        finally:
            _close(passed.values())


def _close(passed: Iterable[Passed]) -> None:
    for one in passed:
        if one.descriptor >= 0:
            os.close(one.descriptor)
