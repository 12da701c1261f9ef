"""Ranks that live are heard out when others are lost, also what they stage: over real channels."""

import asyncio
import socket

import pytest
from fakes import eventually

from engine_service.core.messages import Command, Done, Failed, decode_staging, encode
from engine_service.core.rank_worker import RankWorker
from engine_service.core.ranks import RankGroup
from engine_service.core.update_messages import OpenStaging
from engine_service.errors import RankDied
from relay_service.core.channel import AsyncChannel, ChannelClosed
from relay_service.core.manifest import Manifest

OPEN = OpenStaging(serves=Manifest(0, 0, ()))


class Process:
    """Ends when it is killed."""

    pid = 1

    def __init__(self) -> None:
        self.returncode: int | None = None

    def kill(self) -> None:
        """Ends it."""
        self.returncode = -9

    async def wait(self) -> int:
        """Says how it ended."""
        assert self.returncode is not None
        return self.returncode


class Peer:
    """The other end of a rank: it stages until it is told to drop that."""

    def __init__(self) -> None:
        steps, self._steps = socket.socketpair()
        staging, theirs = socket.socketpair()
        self.worker = RankWorker(0, Process(), AsyncChannel(steps), AsyncChannel(staging))
        self._staging = AsyncChannel(theirs)
        self.heard: list[Command] = []
        self.serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        try:
            while True:
                self.heard.append(decode_staging(await self._staging.receive()))
                if len(self.heard) > 1:
                    await self._staging.send(encode(Failed("WrongState", "given up", {})))
                    await self._staging.send(encode(Done()))
        except ChannelClosed:
            pass

    def die(self) -> None:
        """As by SIGKILL."""
        self.worker.process.kill()
        self._steps.close()
        self._staging.close()

    async def close(self) -> None:
        """Ends it."""
        await self.worker.kill()
        self.die()
        await self.serving


async def test_whoever_stages_lives_on():
    """Two must not read one stream: whoever waits in vain takes a rank that answers for lost."""
    peers = [Peer() for _ in range(3)]
    group = RankGroup([peer.worker for peer in peers], outlives=True)
    staging = asyncio.ensure_future(group.stage_same(OPEN, Done))
    await eventually(lambda: all(peer.heard for peer in peers))
    group.broken = RankDied("rank 1 has died")
    peers[1].worker.process.kill()
    assert await group.settle(2.0) == [1]
    with pytest.raises(RankDied, match="rank 1"):
        await staging
    assert [peer.worker.staging.owed for peer in peers[::2]] == [0, 0]
    for peer in peers:
        await peer.close()
