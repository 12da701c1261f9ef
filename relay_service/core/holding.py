"""One attached life of an instance: what it holds, and the mappings of its arenas.

Plain Python. A holding outlives its engine while leases read from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from relay_service.core.arenas import close_arenas, map_arenas
from relay_service.core.attachment import (
    Attach,
    Update,
    by_sha256,
    check_attach,
    check_same_arenas,
)
from relay_service.core.instance import FILLING_EPOCH, State, Weights, verified_digest
from relay_service.core.lent import Lent
from relay_service.core.manifest import Manifest
from relay_service.core.offer import Offer, OfferSlot
from relay_service.core.ports import Arena, MapArena
from relay_service.core.rate import TokenBucket
from relay_service.core.readers import Readers
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.core.seats import Seats
from relay_service.errors import EpochChanged, NotFound, Refused, WrongState


class Holding:
    """An attached instance. Owns its descriptors and mappings."""

    def __init__(self, attach: Attach, descriptors: list[int], map_arena: MapArena) -> None:
        """Takes the descriptors over, also when it raises.

        Raises `ManifestError`, `InvalidRequest` or `Refused` for an attachment
        that contradicts itself.
        """
        self._descriptors = descriptors
        self._map_arena = map_arena
        self._readers = Readers(attach.instance)
        self._writers: list[Arena] = []
        self.attach = attach
        self.model = attach.model
        self.placement = attach.placement
        self.state = State.STARTING
        self.weights = attach.weights
        self.manifests = list(attach.manifests)
        self.probe = attach.probe
        self.receivers: list[Receiver] = []
        self.landed = Landed()
        self.offered = OfferSlot(attach.instance)
        self.seats = Seats()
        self.egress = TokenBucket()
        self.lent: Lent | None = None
        self.changing_to = ""
        """Version of the weights that come next, while nobody may begin to read these."""
        self.detached = False
        self.artifacts: dict[str, tuple[str, bytes]] = {}
        try:
            check_attach(attach, len(descriptors))
            self.apply(Update(
                model=attach.model, state=attach.state, weights=attach.weights,
                probe=attach.probe, artifacts=attach.artifacts,
            ))  # fmt: skip
        except BaseException:
            self.detached = True
            self.close()
            raise

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.attach.instance

    @property
    def generation(self) -> str:
        """Life of the instance."""
        return self.attach.generation

    def duplicate_descriptors(self) -> list[int]:
        """Returns descriptors of the arenas, by rank, that are the caller's to close."""
        return [os.dup(fd) for fd in self._descriptors]

    def apply(self, update: Update) -> None:
        """Follows the engine. Raises `Refused` for weights that are not proven.

        Then, and when it raises `ManifestError` or `InvalidRequest`, nothing has changed.
        """
        manifests = list(update.manifests) or self.manifests
        # Experts that were moved leave every extent as it is, and make a new epoch.
        moved = self.state.committed and update.weights.epoch > self.weights.epoch
        check_same_arenas(self.manifests, manifests, moved=moved)
        artifacts = self.artifacts if update.artifacts is None else by_sha256(update.artifacts)
        if update.state.holds_weights:
            if self._writers:
                raise WrongState("the writable mapping has not been returned")
            if not verified_digest(manifests, update.weights.digest):
                raise Refused("the manifests do not carry the weights that the engine claims")
            if self._are_other_weights(update.weights):
                raise Refused(f"other weights are called epoch {update.weights.epoch} as well")
            self._readers.map(lambda: self._map(writable=False))
            self.receivers, self.landed = [], Landed()
        self.manifests, self.artifacts = manifests, artifacts
        self.probe = update.probe or self.probe
        state, weights = update.state, update.weights
        known = self.state.holds_weights and weights.epoch == self.weights.epoch
        epochs = self.offered.follow(state, weights)
        self._readers.follow(epochs, news=state.holds_weights and not known)
        self.state, self.weights, self.changing_to = state, weights, ""
        self.model = update.model or self.model
        self.placement = update.placement or self.placement

    def is_whole(self, rank: int) -> bool:
        """Whether a rank's arena holds what its manifest says.

        What is written in place meanwhile can be counted on by nobody, until we are told.
        """
        return self.state.committed and self._readers.current(rank)

    def open_receivers(self) -> list[Receiver]:
        """Maps the arenas for writing and returns their receivers, one per rank.

        Blocks that landed before are kept. Raises `WrongState` for an instance
        that serves, or that somebody fills already.
        """
        if not self.state.fillable or self.detached:
            raise WrongState(
                f"{self.name} is {self.state}: only a dummy can be filled, "
                "or memory that one which serves has lent",
                field="state", expected="DUMMY", found=str(self.state),
            )  # fmt: skip
        if self._writers:
            raise WrongState(f"{self.name} is being filled already")
        self._writers = self._map(writable=True)
        before: list[Receiver | None] = list(self.receivers) or [None] * len(self.manifests)
        self.receivers = [
            Receiver(
                manifest.without_digests(), arena, known.verified if known else None,
                unknown=known.unknown if known else self.attach.touched,
            )
            for manifest, arena, known in zip(self.manifests, self._writers, before, strict=True)
        ]  # fmt: skip
        return self.receivers

    def offer(self, offer: Offer) -> None:
        """Lets others read the blocks that have landed, and those that will.

        A device's arena is not mapped twice: what lands there is read once it's complete.
        """
        if self.receivers and not self.detached and self.attach.descriptors_per_rank == 1:
            self._readers.map(lambda: self._map(writable=False))
            self.offered.put(offer, self.receivers)
            self._readers.follow({offer.epoch}, news=True)

    def keep(self, manifests: list[Manifest]) -> None:
        """Takes note of what a pull has landed; the engine asks before it commits."""
        self.manifests = manifests

    def lend(self, descriptors: list[int]) -> None:
        """Takes memory for new weights beside those that serve, in place of what was lent before.

        Takes the descriptors over, also when it raises. Raises `WrongState` for an instance
        that does not serve, or while memory that it lent is filled, and what `Lent` does.
        """
        if not self.state.updatable or self.detached or (self.lent and self.lent.filling):
            for fd in descriptors:
                os.close(fd)
            what = "is being filled already" if self.lent else f"is {self.state}"
            raise WrongState(f"{self.name} {what}", field="state", found=str(self.state))
        self.drop_lent()
        beside = partial(self._readers.reading, epoch=self.weights.epoch)
        self.lent = Lent(descriptors, self.manifests, self._map_arena, beside)

    @property
    def lent_in_vain(self) -> bool:
        """Whether other weights serve by now than those beside which memory was lent."""
        if self.lent is None:
            return False
        return not self.state.committed or self.weights.digest != self.lent.serves

    def drop_lent(self) -> int:
        """Lets go of lent memory; returns how many arenas of it were mapped."""
        lent, self.lent = self.lent, None
        return lent.close() if lent else 0

    def return_mapping(self) -> int:
        """Unmaps what is mapped for writing, arenas and lent memory; returns how many were."""
        return close_arenas(self._writers) + self.drop_lent()

    @contextmanager
    def reading(self, rank: int, epoch: int, index: int = -1, count: int = 1) -> Iterator[Arena]:
        """Lends a rank's arena for one read, of `count` blocks from one on where it is incomplete.

        Raises `EpochChanged` when the weights are, or became, others than those
        of `epoch`; that comes before whatever the reader made of the bytes. Raises `NotYet`
        where a block is not verified, also afterwards.
        """
        self.offered.check(rank, index, epoch, count)
        with self._readers.reading(rank, epoch) as arena:
            try:
                yield arena
            finally:
                self.offered.check(rank, index, epoch, count)

    def close(self) -> bool:
        """Lets go of memory and descriptors once it is detached and nobody reads.

        Returns whether it did.
        """
        if not self.detached or not self._readers.close():
            return False
        self.return_mapping()
        while self._descriptors:
            os.close(self._descriptors.pop())
        return True

    def manifest(self, rank: int, *, staged: bool = False, epoch: int = 0) -> Manifest:
        """Returns one rank's manifest, or that of what has landed in lent memory.

        Raises `NotFound`, also as long as not all of it has landed, and `EpochChanged` when the
        weights are others than those of `epoch`; 0 stands for any that it holds, and
        `FILLING_EPOCH` for what it is filled with as well.
        """
        offer = self.offered.at(epoch)
        if epoch not in (0, FILLING_EPOCH, self.weights.epoch) and not offer:
            raise EpochChanged(f"{self.name} is at epoch {self.weights.epoch}, not {epoch}")
        # Of an offer that has none yet blocks lie as they do here.
        manifests = (offer and offer.manifests) or self.manifests
        if staged:
            manifests = self.lent.manifests if self.lent else []
        if not 0 <= rank < len(manifests):
            what = "has staged nothing for" if staged else "has no"
            raise NotFound(f"{self.name} {what} rank {rank}", field="rank", found=str(rank))
        return manifests[rank]

    def _are_other_weights(self, weights: Weights) -> bool:
        """Whether readers of what was here would be given others, and never told."""
        same_epoch = self.state.committed and weights.epoch == self.weights.epoch
        return same_epoch and weights.digest != self.weights.digest

    def _map(self, *, writable: bool) -> list[Arena]:
        return map_arenas(self._map_arena, self._descriptors, self.manifests, writable=writable)
