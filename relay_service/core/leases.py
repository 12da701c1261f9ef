"""Leases: who may read which weights, and until when. Plain Python."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from relay_service.core.logs import fields, transfer_id
from relay_service.errors import EpochChanged, LeaseEnded

LEASE_SECONDS = 30.0
LINGER_SECONDS = 5.0
"""Rest of a lease whose reader broke off, unless it comes back."""
_log = logging.getLogger(__name__)


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
    transfer: str
    """Transfer that it is for, as its reader calls it."""
    began_at: float
    bytes_served: int = 0
    replaced: str = ""
    """How the weights that it was on were replaced, once it ended with them."""


class LeaseTable:
    """All leases of one relay. Soft: an unused lease ends by itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self.bytes_served: Counter[str] = Counter()
        """Bytes read under all leases so far, by transport."""

    def acquire(self, instance: str, generation: str, epoch: int, holder: str) -> Lease:
        """Grants a lease."""
        now = self._clock()
        lease = Lease(
            secrets.token_urlsafe(18), holder, instance, generation, epoch,
            now + LEASE_SECONDS, transfer_id.get(), now,
        )  # fmt: skip
        self._leases[lease.lease] = lease
        said = fields(instance=instance, transfer=lease.transfer, holder=holder, epoch=epoch)
        _log.info("lease acquired", extra=said)
        return lease

    def use(self, lease: str) -> Lease:
        """Returns a lease and prolongs it.

        Raises `LeaseEnded` for one that is over, as if it had never been: another one can be had
        on the same weights; and `EpochChanged` for one that ended with its weights.
        """
        found = self._leases.get(lease)
        if found is None or found.expires_at <= self._clock():
            raise LeaseEnded("the lease has ended", field="lease", hint="take a new one")
        if found.replaced:
            raise EpochChanged(found.replaced, field="lease", hint="ask for the new weights")
        found.expires_at = self._clock() + LEASE_SECONDS
        return found

    def break_off(self, lease: str) -> None:
        """Shortens a lease whose reader left in the middle of a read: it may have died."""
        if found := self._leases.get(lease):
            found.expires_at = min(found.expires_at, self._clock() + LINGER_SECONDS)

    def release(self, lease: str) -> None:
        """Ends a lease. Ending it twice is harmless."""
        self._end([lease], "released")

    def expire(self) -> None:
        """Drops every lease that was not used in time."""
        now = self._clock()
        self._end([k for k, v in self._leases.items() if v.expires_at <= now], "expired")

    def end_all(self, instance: str, generation: str) -> None:
        """Ends every lease on one life of an instance."""
        on = [k for k, v in self._leases.items() if _is_on(v, instance, generation)]
        self._end(on, "ended with its instance")

    def end_reading(self, instance: str, generation: str, reason: str) -> None:
        """Ends every lease on one life of an instance whose weights are replaced.

        Whoever uses one hears the reason, as long as the lease would have lasted.
        """
        for lease in self.held(instance, generation):
            self._log_end(lease, "ended by an update")
            lease.replaced = reason

    def served(self, lease: Lease, transport: str, nbytes: int) -> None:
        """Books bytes that were read under a lease."""
        lease.bytes_served += nbytes
        self.bytes_served[transport] += nbytes

    def count(self, instance: str = "", generation: str = "") -> int:
        """Counts the live leases, of all instances or of one life of one."""
        return len(self.held(instance, generation))

    def holders(self, instance: str, generation: str) -> list[str]:
        """Names who holds a live lease on one life of an instance."""
        return [lease.holder for lease in self.held(instance, generation)]

    def held(self, instance: str, generation: str) -> list[Lease]:
        """Lists the live leases on one life of an instance, or on all of them."""
        self.expire()
        live = [v for v in self._leases.values() if not v.replaced]
        return [v for v in live if not instance or _is_on(v, instance, generation)]

    def _end(self, leases: Iterable[str], how: str) -> None:
        for lease in filter(None, [self._leases.pop(lease, None) for lease in leases]):
            if not lease.replaced:  # else it has been said
                self._log_end(lease, how)

    def _log_end(self, lease: Lease, how: str) -> None:
        said = fields(
            instance=lease.instance, transfer=lease.transfer, holder=lease.holder,
            bytes=lease.bytes_served, seconds=round(self._clock() - lease.began_at, 3),
        )  # fmt: skip
        _log.info("lease %s", how, extra=said)


def _is_on(lease: Lease, instance: str, generation: str) -> bool:
    return (lease.instance, lease.generation) == (instance, generation)
