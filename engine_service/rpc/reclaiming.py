"""Asks the relay of this host for the arena of an instance's former life."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from clients.relay import RelayClient
from engine_service.errors import RelayUnreachable, WrongState
from engine_service.rpc.relay_socket import ANSWER_SECONDS, introduced
from relay_service.core.attachment import Accepted, Denied, ToEngine, decode_kept, encode
from relay_service.core.channel import AsyncChannel
from relay_service.core.format import Format, Placement
from relay_service.core.manifest import Manifest
from relay_service.core.reclaiming import HandedBack, Kept, LetGo, Reclaim, Take


class KeptArenas:
    """What a relay has kept, until it is taken or the connection is closed."""

    def __init__(self, channel: AsyncChannel, kept: Kept) -> None:
        self._channel = channel
        self.arena_bytes = kept.arena_bytes
        self.files = kept.artifacts
        self.model = kept.model

    async def take(
        self, format_: Format, placement: Placement, manifests: Sequence[Manifest]
    ) -> tuple[HandedBack, list[int]]:
        """Takes the arenas; their descriptors, by rank, are the caller's."""
        answer = await self._say(Take(format_, placement, tuple(manifests)))
        if not isinstance(answer, HandedBack):
            raise RelayUnreachable(f"the relay handed no arena back: {type(answer).__name__}")
        return answer, self._channel.take_descriptors(len(manifests))

    async def let_go(self) -> None:
        """Has the memory given back."""
        answer = await self._say(LetGo())
        if not isinstance(answer, Accepted):
            raise RelayUnreachable(f"the relay kept the arena: {type(answer).__name__}")

    def close(self) -> None:
        """Leaves what was not taken with the relay."""
        self._channel.close()

    async def _say(self, message: Take | LetGo) -> ToEngine:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._channel.send(encode(message))
                answer = decode_kept(await self._channel.receive())
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise RelayUnreachable(f"the relay was lost: {error}") from error
        if isinstance(answer, Denied):
            raise WrongState(answer.reason)
        return answer


async def ask(relay: RelayClient, instance: str, started_as: str) -> KeptArenas | None:
    """Returns what a relay has kept for an instance; none where it has nothing.

    Raises `RelayUnreachable` and `ConfigError`.
    """
    async with introduced(relay) as channel:
        await channel.send(encode(Reclaim(instance, started_as)))
        answer = decode_kept(await channel.receive())
    if isinstance(answer, Kept):
        return KeptArenas(channel, answer)
    channel.close()
    if isinstance(answer, Denied):  # so does one that is too old to keep anything
        return None
    raise RelayUnreachable(f"the relay answered {type(answer).__name__}")
