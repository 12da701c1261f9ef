"""Connects to the attachment socket of the relay of this host."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from clients.errors import ClientError
from clients.relay import RelayClient
from engine_service.errors import ConfigError, RelayUnreachable
from relay_service.core.channel import AsyncChannel

ANSWER_SECONDS = 5.0
"""A relay that answers nothing for so long is taken for away."""


@asynccontextmanager
async def introduced(relay: RelayClient) -> AsyncGenerator[AsyncChannel]:
    """Connects for what is said first; after an error the connection is closed.

    All of it has to be said in time. Raises `RelayUnreachable`, also for what goes wrong on the
    way, and `ConfigError` for a relay of another user.
    """
    try:
        path, _ = await relay.attachment(ANSWER_SECONDS)
    except ClientError as error:
        raise RelayUnreachable(str(error)) from error
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = AsyncChannel(sock)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, path)
            _check_user(channel, relay.address)
            yield channel
    except (OSError, TimeoutError, msgspec.MsgspecError) as error:
        channel.close()
        raise RelayUnreachable(f"cannot attach to {relay.address}: {error}") from error
    except BaseException:
        channel.close()
        raise


def _check_user(channel: AsyncChannel, relay: str) -> None:
    if channel.peer_credentials()[1] != os.getuid():
        raise ConfigError(f"the relay at {relay} runs as another user", field="relay")
