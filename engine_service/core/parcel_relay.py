"""Fills parcels through the relay of this host, from other instances of the fleet.

Plain Python. To the relay a parcel is a dummy of its own, placed like nobody else: so its
weights are cut anew out of the source's, which moves whole units, wherever they lie there;
nobody reads from it, and a source is never asked for a rank that it has in another shape.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from engine_service.core.parcel import Parcel
from engine_service.core.parcel_order import Order
from engine_service.core.ports import FillProgress, OpenLink, RelayLink
from engine_service.errors import EngineError, RelayUnreachable
from relay_service.core.attachment import Attach
from relay_service.core.instance import Instance, Life, State, Weights
from relay_service.core.pull_report import PullOptions

PARCEL = ".recovery"
"""What follows the name of an instance in that of its parcel."""
MAX_ASKED = 16
"""Instances that are asked what they hold, at most."""
BEGIN_SECONDS = 3.0
"""A source that the relay has not begun to ask in this time has gone, or holds other weights."""
_Held = frozenset[tuple[str, tuple[bytes, ...]]]
"""Names and digests of units."""
_log = logging.getLogger(__name__)


class _Choice(NamedTuple):
    """An instance, and what of the missing units it has."""

    instance: Instance
    units: list[tuple[Parcel, list[str]]]
    nbytes: int


class RelayParcels:
    """Other instances, as the relay knows them."""

    def __init__(
        self,
        link: RelayLink | None,
        open_link: OpenLink,
        describe: Callable[[], Attach],
        only: str = "",
    ) -> None:
        """Asks over `link`, none for an instance without relay, and fills over one of its own.

        `describe` says what the instance is that recovers. `only` names the only source.
        """
        self._link = link
        self._open_link = open_link
        self._describe = describe
        self._only = only
        self._held: dict[Life, _Held] = {}

    async def fill(self, order: Order) -> None:
        """Pulls from one instance after another; each is asked once with the same weights."""
        if self._link is None:
            order.refuse("relay", "not attached to one")
            return
        left: set[Life] = set()
        while not order.complete and (chosen := await self._choose(order, self._link, left)):
            left.add(chosen.instance.life)
            await self._pull(order, self._link.address, chosen)

    async def _choose(self, order: Order, link: RelayLink, left: set[Life]) -> _Choice | None:
        """Returns who has most of what is missing; none where nobody has any of it."""
        own, best = self._describe(), None
        try:
            offers = await link.offers()
        except RelayUnreachable as error:
            order.refuse(f"relay {link.address}", error.message)
            return None
        for one in self._eligible(order, own, offers, link.address):
            if one.life in left or not await self._ask(order, link, one):
                continue
            choice = self._overlap(order, one)
            if not choice.nbytes:
                order.refuse(one.instance, "it holds none of what is missing, or other versions")
            elif not best or choice.nbytes > best.nbytes:
                best = choice
            if best and best.nbytes == _missing_bytes(order.parcels):
                break
        return best

    def _eligible(
        self, order: Order, own: Attach, offers: Sequence[Instance], address: str
    ) -> list[Instance]:
        """Returns who may have whole units of our format: same version, near and idle first."""
        others = [one for one in offers if one.instance != own.instance]
        named = [one for one in others if self._only in ("", one.instance)]
        if not named:
            order.refuse(self._only or "relay", "not there" if self._only else "no other instance")
        fitting = [one for one in named if not _misfit(order, own, one)]
        fitting.sort(
            key=lambda one: (
                one.weights.version != own.weights.version,
                one.address != address,
                one.leases,
                one.instance,
            )
        )
        for one in fitting[MAX_ASKED:]:
            order.refuse(one.instance, f"not asked: {MAX_ASKED} others were")
        return fitting[:MAX_ASKED]

    async def _ask(self, order: Order, link: RelayLink, one: Instance) -> bool:
        """Learns what an instance holds; returns whether that is known."""
        if one.life in self._held:
            return True
        try:
            manifests = await link.manifests_of(one)
        except RelayUnreachable as error:
            order.refuse(one.instance, error.message)
            return False
        units = (unit for manifest in manifests for unit in manifest.units)
        self._held[one.life] = frozenset((unit.name, unit.digests) for unit in units)
        return True

    def _overlap(self, order: Order, one: Instance) -> _Choice:
        held, units, nbytes = self._held[one.life], [], 0
        for parcel in order.parcels:
            there = [u for u in parcel.missing.values() if (u.name, u.digests) in held]
            if there:
                units.append((parcel, [unit.name for unit in there]))
                nbytes += sum(unit.nbytes for unit in there)
        return _Choice(one, units, nbytes)

    async def _pull(self, order: Order, relay: str, chosen: _Choice) -> None:
        name, link = chosen.instance.instance, self._open_link(relay)
        order.say("pulling", name)
        try:
            await self._fill(order, link, chosen)
        except EngineError as error:
            order.refuse(name, error.message)
        finally:
            await link.close()
        came = await order.settle(f"relay:{name}")
        _log.info("%d bytes of %d came from %s", came, chosen.nbytes, name)
        if came < chosen.nbytes:
            order.reasons.setdefault(name, "other bytes came than it announced")

    async def _fill(self, order: Order, link: RelayLink, chosen: _Choice) -> None:
        """Has a relay fill the memory, and give it back. Raises `EngineError`."""
        said = self._attach(chosen.units)
        descriptors = [parcel.fd for parcel, _ in chosen.units]
        options = PullOptions(
            source_instance=chosen.instance.instance,
            weights_digest=chosen.instance.weights.digest,
            timeout_seconds=order.fair_seconds,
        )
        await link.attach(lambda: said, lambda: descriptors)
        try:
            async with asyncio.timeout(BEGIN_SECONDS) as patience:

                def show(progress: FillProgress) -> None:
                    if progress.source_instance:
                        patience.reschedule(None)
                    order.say("pulling", chosen.instance.instance, progress.bytes_verified)

                await link.pull(options, show)
        except TimeoutError:
            raise RelayUnreachable(
                "it has gone, or holds other weights by now: "
                f"the relay did not find it within {BEGIN_SECONDS:g} s"
            ) from None
        if not await link.return_mapping():
            # What lies there is digested below, and by every rank as it takes it.
            _log.warning("the relay did not say that it gave the memory of a parcel back")

    def _attach(self, units: Iterable[tuple[Parcel, Sequence[str]]]) -> Attach:
        """Describes memory that wants some units as a dummy, which may still be another's."""
        own = self._describe()
        placement = msgspec.structs.replace(
            own.placement, expert_map=f"what is missing ({secrets.token_hex(4)})"
        )
        manifests = [parcel.layout(names, n) for n, (parcel, names) in enumerate(units)]
        return Attach(
            instance=own.instance + PARCEL, generation=own.generation, model=own.model,
            state=State.DUMMY, format=own.format, placement=placement, weights=Weights(),
            manifests=tuple(manifests), artifacts={},
        )  # fmt: skip


def _misfit(order: Order, own: Attach, one: Instance) -> bool:
    """Returns, and notes, whether an instance cannot have whole units of our format."""
    reason = one.format.difference(own.format)
    if not one.state.holds_weights or not one.weights.digest:
        reason = f"it is {one.state} and holds no complete weights"
    if reason:
        order.refuse(one.instance, reason)
    return bool(reason)


def _missing_bytes(parcels: Sequence[Parcel]) -> int:
    return sum(unit.nbytes for parcel in parcels for unit in parcel.missing.values())
