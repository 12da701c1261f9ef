"""One rank worker: a spawned process behind two ordered streams. Plain Python.

Steps and control share the first one. On the second one weights are staged, while the rank
serves. Workers are started with exec, never forked: gRPC's threads and locks would not
survive a fork. A worker ends when its first stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from typing import TypeVar

import msgspec

from engine_service import errors
from engine_service.core.messages import Command, Failed, Progress, Reply, decode_reply, encode
from engine_service.core.update_messages import DropStaging
from relay_service.core.channel import AsyncChannel, ChannelClosed

R = TypeVar("R", bound=Reply)
EXIT_SECONDS = 5.0
_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long compute threads wait awake for their next share: about 0.1 ms.

Long enough to stay awake within a step (half again as many tokens per second as threads
that sleep), short enough not to starve others between two. Whoever sets it, or
OMP_WAIT_POLICY, keeps the word.
"""
_log = logging.getLogger(__name__)


class RankStream:
    """One stream to a rank: commands, each of which is answered in turn."""

    def __init__(self, rank: int, pid: int, channel: AsyncChannel) -> None:
        self.rank, self.pid = rank, pid
        """Number of the rank, and its process."""
        self.channel = channel
        self.progress: tuple[int, int] = (0, 0)
        """Bytes done and bytes in all of the command in work."""
        self.owed = 0
        """Commands that are not answered yet."""

    async def send(self, command: Command, *descriptors: int) -> None:
        """Puts a command on the stream. Raises `RankDied`."""
        self.owed += 1
        try:
            await self.channel.send(encode(command), descriptors)
        except ChannelClosed as error:
            raise self._died() from error

    async def reply(self, kind: type[R]) -> R:
        """Waits for the answer to the oldest command. Raises what the rank reports."""
        reply = await self._answer()
        if isinstance(reply, Failed):
            raise _error_of(reply)
        if isinstance(reply, kind):
            return reply
        raise errors.RankDied(f"rank {self.rank} answered {type(reply).__name__}")

    async def settle(self) -> None:
        """Hears out what nobody waits for any more. Raises `RankDied`."""
        while self.owed:
            await self._answer()
        self.channel.drop_descriptors()

    async def _answer(self) -> Reply:
        while True:
            try:
                reply = decode_reply(await self.channel.receive())
            except (ChannelClosed, msgspec.MsgspecError) as error:
                raise self._died() from error
            if not isinstance(reply, Progress):
                self.owed -= 1
                return reply
            self.progress = (reply.bytes_done, reply.bytes_total)

    def _died(self) -> errors.RankDied:
        return errors.RankDied(
            f"rank {self.rank} (process {self.pid}) has died", rank=str(self.rank)
        )


class RankWorker(RankStream):
    """One worker process: the stream of its steps, and the one by which it stages weights."""

    def __init__(
        self, rank: int, process: asyncio.subprocess.Process, channel: AsyncChannel,
        staging: AsyncChannel,
    ) -> None:  # fmt: skip
        super().__init__(rank, process.pid, channel)
        self.process = process
        self.staging = RankStream(rank, process.pid, staging)

    @property
    def has_ended(self) -> bool:
        """Whether the process is no more."""
        return self.process.returncode is not None

    def call(self, rank: int) -> None:
        """Gives it another number."""
        self.rank = self.staging.rank = rank

    async def settled(self) -> None:
        """Hears out what both streams still owe. Raises `RankDied`."""
        await self.settle()
        if self.staging.owed:
            await self.staging.send(DropStaging())
        await self.staging.settle()

    async def kill(self) -> None:
        """Ends the process at once, whatever it does: one that is stopped, too."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.channel.close()
        self.staging.channel.close()

    async def stop(self) -> None:
        """Ends the process, kindly at first."""
        self.channel.close()
        self.staging.channel.close()
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


async def spawn(rank: int, threads: int, shared: tuple[int, ...]) -> RankWorker:
    """Starts the process of a rank, which also inherits the `shared` descriptors."""
    steps, their_steps = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    staging, their_staging = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with their_steps, their_staging:
        inherited = their_steps.fileno(), their_staging.fileno(), *shared
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine_service.device.worker", *map(str, inherited),
            pass_fds=inherited,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,  # stdout belongs to the line that says we listen
            env={**_SPIN, **os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
    name = f"rank {rank}" if rank >= 0 else "a spare rank"
    _log.info("%s is process %d", name, process.pid)
    return RankWorker(rank, process, AsyncChannel(steps), AsyncChannel(staging))


def _error_of(failed: Failed) -> errors.EngineError:
    kind = getattr(errors, failed.kind, errors.EngineError)
    if not (isinstance(kind, type) and issubclass(kind, errors.EngineError)):
        kind = errors.EngineError
    return kind(failed.message, **failed.details)
