"""Hands a kept arena back over the attachment socket. Plain Python."""

from __future__ import annotations

import os

from relay_service.core.attachment import Accepted, decode_to_relay, encode
from relay_service.core.channel import AsyncChannel
from relay_service.core.holdings import Holdings
from relay_service.core.reclaiming import Kept, LetGo, Reclaim, Take
from relay_service.errors import InvalidRequest


async def hand_back(channel: AsyncChannel, holdings: Holdings, asked: Reclaim) -> None:
    """Serves one engine that asks for its former arena.

    Whoever takes it has it alone: it is kept no longer, whatever becomes of the taker. Raises
    `NotFound`, `FormatMismatch`, `InvalidRequest`, and `ChannelClosed` when the engine leaves.
    """
    kept = holdings.kept.find(asked.instance, asked.started_as)
    holding = kept.holding
    artifacts = dict(holding.artifacts.values())
    await channel.send(encode(Kept(holding.model, kept.arena_bytes, artifacts)))
    answer = decode_to_relay(await channel.receive())
    if isinstance(answer, LetGo):
        holdings.forget(asked.instance, "its engine has no use for it")
        await channel.send(encode(Accepted()))
    elif isinstance(answer, Take):
        handed, descriptors = holdings.hand_back(asked, answer)
        try:
            await channel.send(encode(handed), tuple(descriptors))
        finally:
            for fd in descriptors:
                os.close(fd)
    else:
        raise InvalidRequest("a kept arena is taken or let go")
