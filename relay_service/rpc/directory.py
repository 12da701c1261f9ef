"""Announces this relay's instances to its directories, and asks them for everyone else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

from clients.credentials import NOTHING, Credentials
from clients.relay import RelayClient
from relay_service.core.instance import Instance
from relay_service.core.registry import Registry
from relay_service.core.together import together
from relay_service.core.transfer_state import TransferState
from relay_service.rpc.directory_link import DirectoryLink

MAX_SHOWN = 1000
"""Transfers of a fleet that are shown at once."""


class DirectoryFleet:
    """Everyone who is known here: own instances, announced ones, the directories'."""

    def __init__(
        self,
        address: str,
        generation: str,
        directory: str,
        registry: Registry,
        own: Callable[[], list[Instance]],
        credentials: Credentials = NOTHING,
        own_transfers: Callable[[], list[TransferState]] = list,
    ) -> None:
        """Joins every `HOST:PORT` of `directory`, separated by commas, save its own address."""
        self.address = address
        self.generation = generation
        self._start_microseconds = time.time_ns() // 1000
        self._sequence = count(1)
        self._registry = registry
        self._own = own
        self._own_transfers = own_transfers
        named = dict.fromkeys(filter(None, map(str.strip, directory.split(","))))
        self.directories = [
            DirectoryLink(one, self._announce, credentials) for one in named if one != address
        ]

    @property
    def directory(self) -> str:
        """Addresses of the directories, separated by commas; empty where it is one itself."""
        return ",".join(one.address for one in self.directories)

    @property
    def directory_reachable(self) -> bool | None:
        """Whether any directory took the last announcement; None until the first one."""
        said = [one.reachable for one in self.directories if one.reachable is not None]
        return any(said) if said else None

    @property
    def missing(self) -> str:
        """Who did not answer when everyone was asked last; empty when any directory did."""
        silent = [one.address for one in self.directories if one.silent]
        if len(silent) < len(self.directories):
            return ""
        return "; ".join(f"directory {address} does not answer" for address in silent)

    async def instances(self) -> list[Instance]:
        """Lists every known life of an instance once, as this relay knows it or else a directory.

        A directory that cannot be asked is no error: what is known otherwise remains.
        """
        known = {(i.instance, i.generation): i for i in self.known()}
        for found in await together(*(one.instances() for one in self.directories)):
            for instance in found:
                if instance.address != self.address:
                    known.setdefault((instance.instance, instance.generation), instance)
        return list(known.values())

    def known(self) -> list[Instance]:
        """Lists what is known without asking anybody; of its own it knows best."""
        everyone = [*self._registry.instances(), *self._own()]
        return list({(one.instance, one.generation): one for one in everyone}.values())

    def transfers(self, *, own_only: bool = False) -> list[TransferState]:
        """Lists transfers into instances of this relay, and of those that announce to it.

        Those that run come first; of very many only so many are told as fit into a message.
        """
        others = [] if own_only else self._registry.transfers()
        everyone = {one.transfer: one for one in [*others, *self._own_transfers()]}
        return sorted(everyone.values(), key=lambda one: bool(one.outcome))[:MAX_SHOWN]

    def announce_soon(self) -> None:
        """Announces before the next interval: what an incomplete target offers is news."""
        for one in self.directories:
            one.announce_soon()

    async def keep_announced(self) -> None:
        """Announces to every directory at every interval until cancelled; then says goodbye."""
        if not self.directories:
            await asyncio.Event().wait()  # each relay announces; this one has nobody to tell
        await together(*(one.keep_announced() for one in self.directories))

    async def _announce(self, client: RelayClient, stays: bool, timeout: float) -> None:  # noqa: FBT001
        await client.announce(
            self.address,
            self.generation,
            self._own() if stays else [],
            timeout,
            transfers=self._own_transfers() if stays else [],
            order=(self._start_microseconds, next(self._sequence)),
        )
