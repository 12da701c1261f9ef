"""What a pull offers to others while it lands, and just before. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relay_service.core.instance import Instance
from relay_service.core.lane import Lane
from relay_service.core.manifest import Manifest
from relay_service.core.match import Target, placed_otherwise
from relay_service.core.offer import Offer
from relay_service.core.reading import Copied, Way
from relay_service.errors import SourceBusy


class Offering:
    """The offers of one pull, one after the other."""

    def __init__(self, target: Target, offer: Callable[[Offer | None], None]) -> None:
        """`offer` is told what others may read; None for nothing."""
        self._target = target
        self._offer = offer
        self._landing: Offer | None = None
        """The last one whose digests were known, as long as its weights lie there."""
        self._began = False

    def foresee(self, source: Instance, busy: SourceBusy) -> None:
        """Offers what a source will give, before it has granted a lease.

        So no lease waits for another one, however long the line is. Through whom the blocks will
        come whoever was too busy has said; should it be others, readers of this offer ask anew.
        """
        if busy.upstream and not (self._began or placed_otherwise(self._target, source)):
            self._offer(Offer(source, [], busy.probe, busy.upstream))

    def begin(self, lane: Lane) -> None:
        """Offers what will land, before anybody knows its digests: so the next in line can begin.

        They are known where these weights land already.
        """
        self._began = True
        if placed_otherwise(self._target, lane.source):
            self._withdraw()
        else:
            self._put(lane, self._manifests_of(lane.source))

    def lead(self, lane: Lane, way: Way) -> None:
        """Offers what lands, as coming through a source; nothing where it's cut anew."""
        if isinstance(way, Copied):
            self._landing = self._put(lane, way.manifests)
        else:
            self._withdraw()

    def _manifests_of(self, source: Instance) -> Sequence[Manifest]:
        if self._landing and self._landing.source.weights.digest != source.weights.digest:
            self._landing = None
        return self._landing.manifests if self._landing else []

    def _put(self, lane: Lane, manifests: Sequence[Manifest]) -> Offer:
        offer = Offer(lane.source, manifests, lane.probe, lane.upstream)
        self._offer(offer)
        return offer

    def _withdraw(self) -> None:
        self._landing = None
        self._offer(None)
