"""The fleet as its relays announce it: soft state that expires. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from relay_service.core.instance import Instance

RENEW_SECONDS = 1.0
EXPIRY_SECONDS = 5.0


@dataclass
class _Announcement:
    relay_generation: str
    instances: list[Instance]
    expires_at: float


class Registry:
    """Instances of other relays, by the relay that announced them.

    A relay announces everything it has each time, so what it leaves out has left,
    and a registry that lost its memory is whole again after one interval.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._relays: dict[str, _Announcement] = {}

    def announce(self, address: str, relay_generation: str, instances: list[Instance]) -> None:
        """Replaces what one relay announced before. An empty list says goodbye."""
        if instances:
            expires_at = self._clock() + EXPIRY_SECONDS
            self._relays[address] = _Announcement(relay_generation, instances, expires_at)
        else:
            self._relays.pop(address, None)

    def instances(self) -> list[Instance]:
        """Lists the instances of every relay that renewed in time."""
        now = self._clock()
        self._relays = {a: r for a, r in self._relays.items() if r.expires_at > now}
        return [instance for relay in self._relays.values() for instance in relay.instances]
