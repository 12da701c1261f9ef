"""What an incomplete target offers to others: the blocks that it has verified. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from relay_service.core.instance import FILLING_EPOCH, Filling, Instance, State, Weights
from relay_service.core.manifest import Manifest
from relay_service.core.receiver import Receiver
from relay_service.errors import EpochChanged, NotFound, NotYet, ReadsFromReader, SourceFailed

NOT_YET_SECONDS = 1.0
"""Longest wait of a read for a block that is still to come."""
MAX_UPSTREAM = 4096


class Offer:
    """The weights that a target is being filled with, and whom they come from.

    An offer is of one digest and of one line of sources, that of the first one which the target
    reads: what it reads beside that is not waited for. With others it's another offer, at
    another epoch, so readers of the former one ask anew.
    """

    def __init__(
        self, source: Instance, manifests: Sequence[Manifest], probe: bytes, upstream: Sequence[str]
    ) -> None:
        """`source` is whom the target reads from, `upstream` are those that it reads from."""
        self.source = source
        self.manifests = list(manifests)
        """With the digests of blocks that have yet to come; empty while they aren't known."""
        self.probe = probe
        if len(upstream) >= MAX_UPSTREAM:
            raise SourceFailed(f"{source.instance} is filled through {len(upstream)} others")
        self.upstream = (source.instance, *upstream)
        """Everyone that the blocks come through; none of them may read here."""
        self.epoch = 0
        """Given when it is made known."""

    @property
    def filling(self) -> Filling:
        """Describes it as it is announced."""
        of = self.source
        return Filling(of.model, of.weights.version, of.weights.digest, self.epoch, of.instance)

    def continues(self, former: Offer | None) -> bool:
        """Whether readers of a former offer may read on: same weights, and no new way back."""
        if former is None or former.source.weights.digest != self.source.weights.digest:
            return False
        return continues(self.upstream, former.upstream)


def continues(upstream: Sequence[str], former: Sequence[str]) -> bool:
    """Whether a line leads through nobody who may have been admitted as a reader meanwhile.

    So it is with those that a former line named, and with a single complete source, which waits
    for nobody.
    """
    return len(upstream) == 1 or set(upstream) <= set(former)


class Arrivals:
    """Wakes those who wait for blocks of an arena that is being filled."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Has everybody look again. May be called from any thread."""
        for waiting in tuple(self._waiting):
            loop = waiting.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, waiting)

    async def wait_for(self, there: Callable[[], bool], what: str) -> None:
        """Waits until something is there. Raises `NotYet` after a second, and what `there` does."""
        try:
            async with asyncio.timeout(NOT_YET_SECONDS):
                while not there():
                    news = asyncio.get_running_loop().create_future()
                    self._waiting.add(news)
                    try:
                        # What arrived before we were among those who wait woke nobody.
                        if not there():
                            await news
                    finally:
                        self._waiting.discard(news)
        except TimeoutError:
            raise NotYet(f"{what} has not arrived yet", hint="ask again, or elsewhere") from None


class OfferSlot:
    """The present offer of one holding, if any, and who may read what of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.now: Offer | None = None
        self.arrivals = Arrivals()
        self._receivers: Sequence[Receiver] = ()
        self._epoch = FILLING_EPOCH
        self._committed: Offer | None = None

    def put(self, offer: Offer, receivers: Sequence[Receiver]) -> None:
        """Makes an offer known; it keeps the epoch of a former one that it continues."""
        if not offer.continues(self.now):
            self._epoch += 1
        offer.epoch = self._epoch
        self.now, self._receivers = offer, receivers
        for receiver in receivers:
            receiver.on_verified = self.arrivals.tell
        self.arrivals.tell()

    def withdraw(self) -> None:
        """Ends the offer; who waits for something of it hears so at once."""
        self.now = None
        self.arrivals.tell()

    def follow(self, state: State, weights: Weights) -> set[int]:
        """Follows the instance; returns the epochs at which it may be read.

        Who reads what it was filled with reads on when exactly that is committed.
        """
        if state.fillable:
            return {self.now.epoch} if self.now else set()
        if self.now:
            self._committed = self.now
            self.withdraw()
        done = self._committed
        if not (done and state.committed and weights.digest == done.source.weights.digest):
            done = self._committed = None
        return {weights.epoch, done.epoch} if done else {weights.epoch}

    def at(self, epoch: int) -> Offer | None:
        """Returns the offer, present or committed, that is read at an epoch.

        `FILLING_EPOCH` stands for the present one, whatever its epoch.
        """
        if epoch == FILLING_EPOCH:
            return self.now
        return next((o for o in (self.now, self._committed) if o and o.epoch == epoch), None)

    def admit(self, reader: str, epoch: int, digest: str) -> int:
        """Returns the epoch at which a reader gets certain weights here, or 0 if they don't come.

        Epoch 0 asks for whatever line they come through. Raises `ReadsFromReader` when the reader
        is part of it.
        """
        offer = self.now
        if offer is None or epoch not in (0, offer.epoch) or offer.source.weights.digest != digest:
            return 0
        if reader in (self._name, *offer.upstream):
            raise ReadsFromReader(f"{self._name} is filled from {reader}", hint="ask another one")
        return offer.epoch

    def check(self, rank: int, index: int, epoch: int, count: int = 1) -> None:
        """Raises `NotYet` for blocks that aren't verified, `EpochChanged` for an offer that ended.

        What is committed is not looked at.
        """
        if (there := self.there(rank, index, epoch, count)) < count:
            raise NotYet(f"{self._name} has not verified block {index + there} of rank {rank}")

    def has(self, rank: int, index: int, epoch: int) -> bool:
        """Whether a block may be read. Raises as `check` does, and `NotFound`."""
        return bool(self.there(rank, index, epoch, 1))

    def there(self, rank: int, first: int, epoch: int, count: int) -> int:
        """Returns how many of `count` blocks from `first` on may be read before one may not.

        Raises `EpochChanged` for an offer that ended, and `NotFound`.
        """
        if epoch < FILLING_EPOCH:
            return count
        if (offer := self.at(epoch)) is None:
            raise EpochChanged(f"{self._name} is not filled with what it was filled with before")
        if not 0 <= rank < len(self._receivers):
            raise NotFound(f"{self._name} has no readable rank {rank}")
        if not offer.manifests:
            return 0  # what lies there may be of other weights
        if offer is self._committed:
            return count
        verified = self._receivers[rank].verified[first : first + count] if first >= 0 else []
        return next((n for n, digest in enumerate(verified) if not digest), len(verified))

    async def arrival(self, rank: int, index: int, epoch: int) -> None:
        """Waits for a block that is still to come; see `check` for what it raises."""
        if epoch > FILLING_EPOCH:
            what = f"block {index} of rank {rank} of {self._name}"
            await self.arrivals.wait_for(lambda: self.has(rank, index, epoch), what)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
