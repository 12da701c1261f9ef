"""The fleet as its relays announce it: soft state that expires. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relay_service.core.instance import Instance
from relay_service.core.transfer_state import TransferState
from relay_service.errors import Conflict

RENEW_SECONDS = 1.0
EXPIRY_SECONDS = 5.0
MAX_TRANSFERS_PER_RELAY = 64
"""Transfers, running and ended ones, that one relay's announcement shows."""

Order = tuple[int, int]
"""When the life of a relay began, in microseconds since 1970; number of the announcement."""


@dataclass
class _Announcement:
    relay_generation: str
    order: Order
    instances: Sequence[Instance]
    transfers: Sequence[TransferState]
    expires_at: float


class Registry:
    """Instances and transfers of other relays, by the relay that announced them.

    A relay announces everything it has each time, so what it leaves out has left,
    and a registry that lost its memory is whole again after one interval.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._relays: dict[str, _Announcement] = {}

    def announce(
        self,
        address: str,
        relay_generation: str,
        instances: Sequence[Instance],
        transfers: Sequence[TransferState] = (),
        order: Order = (0, 0),
    ) -> None:
        """Replaces what one relay announced before. An empty list of instances says goodbye.

        What was announced earlier and arrives late changes nothing, also after a goodbye. Raises
        `Conflict` for a life of the relay that began before the one that is known.
        """
        self._expire()
        if known := self._relays.get(address):
            if order[0] < known.order[0]:
                raise Conflict(
                    f"a relay that was started later announces {address}",
                    field="address", found=address, hint="give each relay its own --advertise",
                )  # fmt: skip
            if relay_generation == known.relay_generation and order < known.order:
                return
        # Who says goodbye is remembered as long: what is still under way must not bring it back.
        self._relays[address] = _Announcement(
            relay_generation, order, instances, transfers[:MAX_TRANSFERS_PER_RELAY],
            self._clock() + EXPIRY_SECONDS,
        )  # fmt: skip

    def instances(self) -> list[Instance]:
        """Lists the instances of every relay that renewed in time."""
        self._expire()
        return [instance for relay in self._relays.values() for instance in relay.instances]

    def transfers(self) -> list[TransferState]:
        """Lists the transfers of every relay that renewed in time."""
        self._expire()
        return [transfer for relay in self._relays.values() for transfer in relay.transfers]

    def _expire(self) -> None:
        now = self._clock()
        self._relays = {a: r for a, r in self._relays.items() if r.expires_at > now}
