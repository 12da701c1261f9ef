"""Leases: who may read which weights, and until when. Plain Python."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from relay_service.errors import LeaseEnded

LEASE_SECONDS = 30.0


@dataclass
class Lease:
    """Permission to read the weights that one holding has now."""

    lease: str
    holder: str
    """Name of the instance that reads."""
    instance: str
    generation: str
    epoch: int
    expires_at: float


class LeaseTable:
    """All leases of one relay. Soft: an unused lease ends by itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}

    def acquire(self, instance: str, generation: str, epoch: int, holder: str) -> Lease:
        """Grants a lease."""
        lease = Lease(
            secrets.token_urlsafe(18), holder, instance, generation, epoch,
            self._clock() + LEASE_SECONDS,
        )  # fmt: skip
        self._leases[lease.lease] = lease
        return lease

    def use(self, lease: str) -> Lease:
        """Returns a lease and prolongs it. Raises `LeaseEnded`."""
        found = self._leases.get(lease)
        if found is None or found.expires_at <= self._clock():
            raise LeaseEnded("the lease has ended", field="lease", hint="take a new one")
        found.expires_at = self._clock() + LEASE_SECONDS
        return found

    def release(self, lease: str) -> None:
        """Ends a lease. Ending it twice is harmless."""
        self._leases.pop(lease, None)

    def expire(self) -> None:
        """Drops every lease that was not used in time."""
        now = self._clock()
        self._leases = {k: v for k, v in self._leases.items() if v.expires_at > now}

    def end_all(self, instance: str, generation: str) -> None:
        """Ends every lease on one life of an instance."""
        kept = {k: v for k, v in self._leases.items() if not _is_on(v, instance, generation)}
        self._leases = kept

    def count(self, instance: str = "", generation: str = "") -> int:
        """Counts the live leases, of all instances or of one life of one."""
        self.expire()
        return sum(
            1 for v in self._leases.values() if not instance or _is_on(v, instance, generation)
        )


def _is_on(lease: Lease, instance: str, generation: str) -> bool:
    return (lease.instance, lease.generation) == (instance, generation)
