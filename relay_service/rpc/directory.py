"""Announces this relay's instances to its directory, and asks it for everyone else's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from clients.credentials import NOTHING, Credentials
from clients.errors import ClientError
from clients.relay import RelayClient
from relay_service.core.instance import Instance
from relay_service.core.match import Target
from relay_service.core.registry import RENEW_SECONDS, Registry
from relay_service.errors import RelayError

DIRECTORY_SECONDS = 2.0
"""Longest wait for the directory: less than what anybody waits who asks this relay."""
LEAST_SECONDS = 0.05
"""Between two announcements, whatever happens."""
_log = logging.getLogger(__name__)


class DirectoryFleet:
    """Everyone who is known here: own instances, announced ones, the directory's."""

    def __init__(
        self,
        address: str,
        generation: str,
        directory: str,
        registry: Registry,
        own: Callable[[], list[Instance]],
        credentials: Credentials = NOTHING,
    ) -> None:
        self.address = address
        self.generation = generation
        self.directory = directory
        self.directory_reachable: bool | None = None
        """None until the first announcement."""
        self._registry = registry
        self._own = own
        self._client = RelayClient(directory, credentials) if directory else None
        self._changed = asyncio.Event()
        self.missing = ""
        """Who did not answer when everyone was asked last; empty when all did."""

    async def instances(self) -> list[Instance]:
        """Lists every known life of an instance once, as this relay knows it or else its directory.

        A directory that cannot be asked is no error: what is known here remains.
        """
        known = {(i.instance, i.generation): i for i in self.known()}
        for instance in await self._ask_directory():
            if instance.address != self.address:
                known.setdefault((instance.instance, instance.generation), instance)
        return list(known.values())

    def known(self) -> list[Instance]:
        """Lists what is known without asking anybody; of its own it knows best."""
        everyone = [*self._registry.instances(), *self._own()]
        return list({(one.instance, one.generation): one for one in everyone}.values())

    def announce_soon(self) -> None:
        """Announces before the next interval: what an incomplete target offers is news."""
        self._changed.set()

    async def keep_announced(self) -> None:
        """Announces every interval until cancelled; then says goodbye."""
        try:
            while True:
                await self._announce(self._own())
                await asyncio.sleep(LEAST_SECONDS)
                # Unlike `wait_for`, which forgets that it was cancelled when news come just then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_SECONDS - LEAST_SECONDS):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await self._announce([])
            if self._client:
                await self._client.close()

    async def _announce(self, instances: list[Instance]) -> None:
        if not self._client:
            return
        try:
            await self._client.announce(self.address, self.generation, instances, DIRECTORY_SECONDS)
        except ClientError as error:
            if self.directory_reachable is not False:
                _log.warning("directory %s: %s", self.directory, error)
            self.directory_reachable = False
        else:
            if not self.directory_reachable:
                _log.info("announced to directory %s", self.directory)
            self.directory_reachable = True

    async def _ask_directory(self) -> list[Instance]:
        if not self._client:
            return []
        if self.directory_reachable is False:  # whoever announces finds out when it is back
            self.missing = f"directory {self.directory} does not answer"
            return []
        try:
            found = await self._client.sources(
                Target(), without_directory=True, timeout=DIRECTORY_SECONDS
            )
        except (ClientError, RelayError) as error:
            if not self.missing:
                _log.warning("directory %s: %s", self.directory, error)
            self.missing = f"directory {self.directory} does not answer"
            return []
        self.missing = ""
        return [match.instance for match in found]
