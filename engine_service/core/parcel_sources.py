"""Brings what nobody here holds, from whoever has it: other instances first, then the disk.

    missing → parcel → attached to the relay as a dummy of its own → pulled → digested → taken

Plain Python. Who gives it does not matter: what lies there must have the digests that the lost
ranks' units had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from engine_service.core.membership import OnExpertProgress, PulledUnit
from engine_service.core.parcel import Parcel, parcels_of
from engine_service.core.parcel_order import Order
from engine_service.core.recovery_plan import Missing
from engine_service.errors import EngineError, RankDied, RecoveryFailed
from relay_service.core.manifest import Manifest
from relay_service.core.together import in_thread, together
from relay_service.errors import RelayError

ReadPart = Callable[[int, Manifest, int], Awaitable[Manifest]]
"""Has a rank of a tensor-parallel part read units of the folder into memory behind a descriptor.

Returns the manifest with the digests of what lies there.
"""
LONGEST_SECONDS = 120.0
"""Deadline of whoever names none."""


class ParcelSource(Protocol):
    """Somebody who may have what is missing."""

    async def fill(self, order: Order) -> None:
        """Fills what it can of what is missing, and notes why it could not fill the rest."""


class Fetched(NamedTuple):
    """What came, for ranks to take; whoever asked closes it."""

    parcels: tuple[Parcel, ...]
    """One for each part that missed something."""
    pulled: tuple[PulledUnit, ...]

    def close(self) -> None:
        """Lets go of the memory."""
        for parcel in self.parcels:
            parcel.close()


class DiskParcels:
    """The model folder, of which ranks read just what is missing."""

    def __init__(self, folder: str, read: ReadPart) -> None:
        self._folder = folder
        self._read = read

    async def fill(self, order: Order) -> None:
        """Reads all parts at once. Raises `RankDied` where a rank did."""
        order.say("reading", self._folder)
        wanting = [parcel for parcel in order.parcels if parcel.missing]
        came = await together(*(self._fill(parcel) for parcel in wanting))
        await order.settle(f"disk:{self._folder}")
        refused = next(filter(None, came), "")
        if not order.complete:
            order.refuse(f"disk:{self._folder}", refused or "it holds other weights")

    async def _fill(self, parcel: Parcel) -> str:
        """Has a part read; returns why it could not be."""
        layout = parcel.layout(parcel.missing, parcel.part)
        try:
            await self._read(parcel.part, layout, parcel.fd)
        except RankDied:
            raise
        except EngineError as error:
            return error.message
        return ""


async def fetch(
    missing: Iterable[Missing],
    sources: Sequence[ParcelSource],
    on_progress: OnExpertProgress = lambda _: None,
    *,
    timeout_seconds: float = LONGEST_SECONDS,
) -> Fetched:
    """Fetches what is missing from sources in order, each asked for what the former ones left.

    Raises `RecoveryFailed` that lists who was asked and why not, also at the deadline; then,
    and when it is cancelled, nothing is left attached, mapped or open. `RankDied` where a rank
    died that should read.
    """
    parcels = parcels_of(missing)
    order = Order(parcels, on_progress, timeout_seconds)
    try:
        await _fill(order, sources, timeout_seconds)
    except BaseException:
        Fetched(parcels, ()).close()
        raise
    return Fetched(parcels, tuple(order.pulled))


async def _fill(order: Order, sources: Sequence[ParcelSource], timeout_seconds: float) -> None:
    """Raises `RecoveryFailed`."""
    try:
        async with asyncio.timeout(timeout_seconds):
            for parcel in order.parcels:
                await in_thread(parcel.allocate)
            for source in sources:
                if not order.complete:
                    await source.fill(order)
    except TimeoutError:
        raise order.failed(f"not within {timeout_seconds:g} s") from None
    except RelayError as error:
        raise RecoveryFailed(f"what is missing cannot be held: {error}", **error.details) from error
    if not order.complete:
        raise order.failed()
