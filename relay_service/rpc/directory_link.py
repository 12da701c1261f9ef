"""One directory of a relay: announces to it until it is cancelled, and asks it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from clients.credentials import Credentials
from clients.errors import ClientError
from clients.relay import RelayClient
from relay_service.core.instance import Instance
from relay_service.core.match import Target
from relay_service.core.registry import RENEW_SECONDS
from relay_service.errors import RelayError

DIRECTORY_SECONDS = 2.0
"""Longest wait for a directory: less than what anybody waits who asks this relay."""
LEAST_SECONDS = 0.05
"""Between two announcements, whatever happens."""
_log = logging.getLogger(__name__)

Announce = Callable[[RelayClient, bool, float], Awaitable[None]]
"""Announces what there is, or with False that nothing is left, within so many seconds."""


class DirectoryLink:
    """A directory, and whether it answers."""

    def __init__(self, address: str, announce: Announce, credentials: Credentials) -> None:
        self.address = address
        self.reachable: bool | None = None
        """None until the first announcement."""
        self.silent = False
        """Whether it did not answer when it was asked last."""
        self._announce_to = announce
        self._client = RelayClient(address, credentials)
        self._changed = asyncio.Event()

    def announce_soon(self) -> None:
        """Announces before the next interval."""
        self._changed.set()

    async def keep_announced(self) -> None:
        """Announces every interval until cancelled; then says goodbye."""
        try:
            while True:
                await self._announce(stays=True)
                await asyncio.sleep(LEAST_SECONDS)
                # Unlike `wait_for`, which forgets that it was cancelled when news come just then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_SECONDS - LEAST_SECONDS):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await self._announce(stays=False)
            await self._client.close()

    async def instances(self) -> list[Instance]:
        """Asks it whom it knows; nobody where it does not answer."""
        if self.reachable is False:  # whoever announces finds out when it is back
            self.silent = True
            return []
        try:
            found = await self._client.sources(
                Target(), without_directory=True, timeout=DIRECTORY_SECONDS
            )
        except (ClientError, RelayError) as error:
            if not self.silent:
                _log.warning("directory %s: %s", self.address, error)
            self.silent = True
            return []
        self.silent = False
        return [match.instance for match in found]

    async def _announce(self, *, stays: bool) -> None:
        try:
            await self._announce_to(self._client, stays, DIRECTORY_SECONDS)
        except ClientError as error:
            if self.reachable is not False:
                _log.warning("directory %s: %s", self.address, error)
            self.reachable = False
        else:
            if not self.reachable:
                _log.info("announced to directory %s", self.address)
            self.reachable = True
