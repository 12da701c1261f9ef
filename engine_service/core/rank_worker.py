"""One rank worker: a spawned process behind one ordered stream. Plain Python.

Workers are started with exec, never forked: gRPC's threads and locks would not
survive a fork. A worker ends when its stream ends.
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


class RankWorker:
    """One worker process and the stream to it."""

    def __init__(
        self, rank: int, process: asyncio.subprocess.Process, channel: AsyncChannel
    ) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.progress: tuple[int, int] = (0, 0)
        """Bytes done and bytes in all of the command in work."""

    @property
    def pid(self) -> int:
        """Process of the rank."""
        return self.process.pid

    async def send(self, command: Command) -> None:
        """Puts a command on the stream. Raises `RankDied`."""
        try:
            await self.channel.send(encode(command))
        except ChannelClosed as error:
            raise self._died() from error

    async def reply(self, kind: type[R]) -> R:
        """Waits for the answer to the oldest command. Raises what the rank reports."""
        while True:
            try:
                reply = decode_reply(await self.channel.receive())
            except (ChannelClosed, msgspec.MsgspecError) as error:
                raise self._died() from error
            if isinstance(reply, Progress):
                self.progress = (reply.bytes_done, reply.bytes_total)
            elif isinstance(reply, Failed):
                raise _error_of(reply)
            elif isinstance(reply, kind):
                return reply
            else:
                raise errors.RankDied(f"rank {self.rank} answered {type(reply).__name__}")

    async def stop(self) -> None:
        """Ends the process, kindly at first."""
        self.channel.close()
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def _died(self) -> errors.RankDied:
        return errors.RankDied(
            f"rank {self.rank} (process {self.pid}) has died", rank=str(self.rank)
        )


async def spawn(rank: int, threads: int, shared: tuple[int, ...]) -> RankWorker:
    """Starts the process of a rank, which also inherits the `shared` descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine_service.device.worker", str(theirs.fileno()),
            *map(str, shared),
            pass_fds=(theirs.fileno(), *shared),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,  # stdout belongs to the line that says we listen
            env={**_SPIN, **os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
    _log.info("rank %d is process %d", rank, process.pid)
    return RankWorker(rank, process, AsyncChannel(ours))


def _error_of(failed: Failed) -> errors.EngineError:
    kind = getattr(errors, failed.kind, errors.EngineError)
    if not (isinstance(kind, type) and issubclass(kind, errors.EngineError)):
        kind = errors.EngineError
    return kind(failed.message, **failed.details)
