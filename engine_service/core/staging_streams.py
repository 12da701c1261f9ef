"""The second stream of every rank: weights are staged there, in one order, while steps go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TypeVar

from engine_service import errors
from engine_service.core.messages import Command, Done, Reply
from engine_service.core.rank_worker import RankStream, RankWorker
from engine_service.core.replies import cause, died, failures_of, let_go, quiet
from engine_service.core.update_messages import DropStaging, LendStaging, Lent

R = TypeVar("R", bound=Reply)


class StagingStreams:
    """Commands to all ranks; no next one is sent before all have answered."""

    def __init__(self, workers: Sequence[RankWorker]) -> None:
        self._workers = workers
        self._ordered = asyncio.Lock()
        self._abandoned = asyncio.Event()
        self.broken: BaseException | None = None
        """That a rank has died; nothing is sent any more."""

    async def all(self, commands: Sequence[Command], kind: type[R]) -> list[R]:
        """Gives each rank its command and returns their answers, by rank.

        Raises what went wrong first, once every rank has answered, or at once when a rank
        has died. A caller that is cancelled gives up: ranks stop what they are at, and drop it.
        """
        gone = asyncio.Event()
        work = asyncio.ensure_future(self._all(commands, kind, gone))
        try:
            return await asyncio.shield(quiet(work))
        except asyncio.CancelledError:
            gone.set()
            raise

    async def lend(self) -> list[list[int]]:
        """Has every rank lend memory; returns the descriptors by rank, which the caller owns."""
        work = asyncio.ensure_future(self._lend())
        try:
            return await asyncio.shield(quiet(work))
        except asyncio.CancelledError:
            work.add_done_callback(_close_all)
            raise

    async def abandon(self, error: errors.RankDied) -> None:
        """Ends whatever is staged with an error; afterwards nobody here reads answers any more."""
        self.broken = self.broken or error
        self._abandoned.set()
        async with self._ordered:
            pass

    async def _lend(self) -> list[list[int]]:
        async with self._ordered:
            replies = await self._ask([LendStaging()] * len(self._workers), Lent, asyncio.Event())
            return [
                stream.channel.take_descriptors(reply.descriptors)
                for stream, reply in zip(self._streams, replies, strict=True)
            ]

    async def _all(
        self, commands: Sequence[Command], kind: type[R], gone: asyncio.Event
    ) -> list[R]:
        async with self._ordered:
            return await self._ask(commands, kind, gone)

    async def _ask(
        self, commands: Sequence[Command], kind: type[R], gone: asyncio.Event
    ) -> list[R]:
        if self.broken:
            raise self.broken
        if gone.is_set():
            raise errors.WrongState("staging was given up")
        await self._send(commands)
        replies = [asyncio.ensure_future(stream.reply(kind)) for stream in self._streams]
        answers = asyncio.ensure_future(self._answers(replies, gone))
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        try:
            await asyncio.wait([answers, abandoned], return_when=asyncio.FIRST_COMPLETED)
            if self.broken and not answers.done():
                raise self.broken
            failures = answers.result()
        finally:
            await let_go([abandoned])
            await let_go([answers])
            await let_go(replies)
        self.broken = self.broken or next(
            (f for f in failures if died(f, errors.CollectiveFailed)), None
        )
        if failures:
            raise cause(failures)
        return [reply.result() for reply in replies]

    async def _answers(
        self, replies: Sequence[asyncio.Future[R]], gone: asyncio.Event
    ) -> list[BaseException]:
        """Waits for all. When the caller goes, ranks drop what they are at, and answer that too."""
        answers = asyncio.ensure_future(failures_of(replies, past=errors.CollectiveFailed))
        leaving = asyncio.ensure_future(gone.wait())
        dropped: list[asyncio.Future[Done]] = []
        try:
            await asyncio.wait([answers, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return answers.result()
            await self._send([DropStaging()] * len(self._workers))
            failures = await answers
            if not any(died(one, errors.CollectiveFailed) for one in failures):
                dropped = [asyncio.ensure_future(stream.reply(Done)) for stream in self._streams]
                failures += await failures_of(dropped)
            return failures
        finally:
            await let_go([leaving])
            await let_go([answers])
            await let_go(dropped)

    async def _send(self, commands: Sequence[Command]) -> None:
        try:
            for stream, command in zip(self._streams, commands, strict=True):
                await stream.send(command)
        except errors.RankDied as error:
            self.broken = error
            raise

    @property
    def _streams(self) -> list[RankStream]:
        return [worker.staging for worker in self._workers]


def _close_all(lent: asyncio.Future[list[list[int]]]) -> None:
    if not lent.cancelled() and not lent.exception():
        for fd in (one for descriptors in lent.result() for one in descriptors):
            os.close(fd)
