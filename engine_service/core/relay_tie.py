"""What ties an instance to its relay, and who may write into its arenas. Plain Python."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from engine_service.core.phases import Phases
from engine_service.core.ports import OpenLink, RelayLink
from engine_service.core.ranks import RankGroup
from engine_service.errors import ConfigError, WrongState
from relay_service.core.attachment import Attach
from relay_service.core.manifest import Manifest

_log = logging.getLogger(__name__)


class RelayTie(ABC):
    """The part of an instance that knows its relay."""

    def __init__(self, ranks: RankGroup, open_link: OpenLink) -> None:
        self.ranks = ranks
        self.phases = Phases()
        self.open_link = open_link
        self.link: RelayLink | None = None
        self.lent = False
        """Whether a relay was asked to write into the arenas, and may still be able to."""

    @abstractmethod
    def describe(self) -> Attach:
        """Describes the instance as it is now."""

    def link_to(self, relay: str) -> RelayLink:
        """Returns the link to the relay of this host. Raises `WrongState` for another one."""
        if self.link is None:
            self.link = self.open_link(relay)
        elif self.link.address != relay:
            raise WrongState(
                f"attached to {self.link.address} already",
                field="relay", expected=self.link.address, found=relay,
            )  # fmt: skip
        return self.link

    async def attach(self, relay: str) -> RelayLink:
        """Attaches to the relay of this host. Raises `RelayUnreachable` or `ConfigError`."""
        link = self.link_to(relay)
        try:
            with self.phases.measure("attach"):
                await link.attach(
                    self.describe, lambda: [fd for one in self.ranks.descriptors for fd in one]
                )
        except ConfigError:
            await self.leave_relay()  # denied for good; another one may still be named
            raise
        return link

    async def leave_relay(self) -> None:
        """Lets go of the relay, which can write no more then."""
        if self.link:
            await self.take_back(self.link)
            link, self.link = self.link, None
            await link.close()

    async def take_back(self, link: RelayLink) -> list[Manifest]:
        """Makes sure that nobody but the ranks can write to the arenas any more.

        A relay that does not say that it gave up writing is cut off; then the manifests
        of what lies in the fresh memory are returned.
        """
        moved: list[Manifest] = []
        if self.lent and not await link.return_mapping():
            _log.warning("the relay did not return its mapping: moving the arenas away from it")
            link.detach()
            moved = await self.ranks.cut_off()
        self.lent = False
        return moved

    def attach_anew(self) -> None:
        """Has the relay see the arenas of other ranks than before; the link does it by itself."""
        if self.link:
            self.link.detach()

    async def tell_relay(self) -> None:
        """Tells the relay, if there is one, how the instance changed."""
        if self.link:
            await self.link.update()
