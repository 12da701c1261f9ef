"""All instances that are attached to this relay, what is kept of former ones, and the leases.

Plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from relay_service.core.attachment import Closing
from relay_service.core.grants import Grant, Run, check_runs
from relay_service.core.holding import Holding
from relay_service.core.instance import FILLING_EPOCH, Instance, State
from relay_service.core.kept import KeptArenas, is_worth_keeping, what_lies_in
from relay_service.core.leases import Lease, LeaseTable
from relay_service.core.manifest import Manifest
from relay_service.core.rate import TokenBucket
from relay_service.core.reclaiming import HandedBack, Reclaim, Take
from relay_service.core.record import record
from relay_service.errors import Conflict, EpochChanged, NotFound, SourceBusy, WrongState


class Holdings:
    """Holdings by instance name; detached ones stay while leases read from them."""

    def __init__(self, egress_limit_per_instance: float = 0) -> None:
        """Bounds the bytes per second that each instance gives away; 0 for no limit."""
        self._egress_limit_per_instance = egress_limit_per_instance
        self.leases = LeaseTable()
        self._attached: dict[str, Holding] = {}
        self._closing = False
        self._leaving: list[Holding] = []
        self.kept = KeptArenas(self._leaving.append)

    def add(self, holding: Holding) -> None:
        """Adds an attached instance. Raises `Conflict` when its name is taken."""
        if holding.name in self._attached:
            raise Conflict(
                f"an instance named {holding.name} is attached already",
                field="instance", found=holding.name, hint="give it another --instance-name",
            )  # fmt: skip
        holding.egress = TokenBucket(self._egress_limit_per_instance)
        self._attached[holding.name] = holding
        self.forget(holding.name, "another life has attached")

    def forget(self, name: str, reason: str) -> bool:
        """Gives the memory back that is kept for an instance; returns whether there was any."""
        there = self.kept.forget(name, reason)
        self.sweep()
        return there

    def hand_back(self, asked: Reclaim, wanted: Take) -> tuple[HandedBack, list[int]]:
        """Takes an arena that is kept; its descriptors, by rank, are the caller's to close.

        Raises `NotFound` or `FormatMismatch`.
        """
        holding = self.kept.take(asked.instance, asked.started_as, wanted)
        descriptors = holding.duplicate_descriptors()
        self._leaving.append(holding)
        self.sweep()
        return HandedBack(holding.weights, what_lies_in(holding), holding.probe), descriptors

    def detach(self, holding: Holding) -> None:
        """Takes an instance off the list; readers with a lease may finish.

        Its arenas are kept where it asked for that.
        """
        holding.detached = True
        holding.drop_lent()
        if self._attached.get(holding.name) is holding:
            del self._attached[holding.name]
        if is_worth_keeping(holding) and not self._closing:
            self.kept.keep(holding)
        else:
            self._leaving.append(holding)
        self.sweep()

    def sweep(self) -> None:
        """Ends what is over: leases, keeping, and detached holdings that nobody reads."""
        self.leases.expire()
        self.kept.expire()
        self._leaving[:] = [h for h in self._leaving if self._in_use(h) or not h.close()]

    def close(self) -> None:
        """Lets go of everything, leases or not."""
        self._closing = True
        for kept in self.kept:
            self.kept.forget(kept.holding.name, "the relay ends")
        for holding in [*self._attached.values(), *self._leaving]:
            self.leases.end_all(holding.name, holding.generation)
        for holding in list(self._attached.values()):
            self.detach(holding)
        self.sweep()

    def find(self, name: str, generation: str = "") -> Holding | None:
        """Finds an attached instance, of one life or of any."""
        holding = self._attached.get(name)
        if holding and generation not in ("", holding.generation):
            return None
        return holding

    def get(self, name: str, generation: str = "") -> Holding:
        """Returns an attached instance. Raises `NotFound`."""
        holding = self.find(name, generation)
        if holding is None:
            raise NotFound(
                f"instance {name!r} is not attached to this relay", field="instance", found=name
            )
        return holding

    def records(self, address: str) -> list[Instance]:
        """Describes every attached instance as it is announced."""
        return [
            record(holding, address, len(held), held)
            for holding in self._attached.values()
            for held in [self.leases.held(holding.name, holding.generation)]
        ]

    def acquire(
        self, name: str, generation: str, epoch: int, digest: str, holder: str,
        *, yields: bool = False,
    ) -> Lease:  # fmt: skip
        """Grants a lease on weights as they were announced, or on those that are still coming.

        Raises `NotFound`, `EpochChanged` when the instance holds others by now or is about to,
        `WrongState` when it holds none, `ReadsFromReader` when it's filled from `holder`, and
        `SourceBusy` for one that `yields` to its other readers.
        """
        holding = self.get(name, generation)
        if coming := holding.offered.admit(holder, epoch, digest):
            epoch = coming
        else:
            epoch = _committed(holding, epoch, digest)
        if yields:
            self._check_seats(holding, holder)
        return self.leases.acquire(name, holding.generation, epoch, holder)

    def close_to_readers(self, holding: Holding, closing: Closing) -> tuple[str, ...]:
        """Lets nobody begin to read weights that will be replaced; returns who reads them."""
        holding.changing_to = closing.version
        readers = self.leases.holders(holding.name, holding.generation)
        if closing.ends_leases:
            reason = f"{holding.name}: its weights are updated to {closing.version}"
            self.leases.end_reading(holding.name, holding.generation, reason)
        return tuple(readers)

    async def filled(self, name: str, generation: str) -> None:
        """Waits a second at most for a dummy to be filled, so that there's something to read.

        Raises `NotFound`, or `NotYet` when nobody fills it.
        """
        holding = self.get(name, generation)
        if holding.state.fillable:
            there = partial(_is_filled, holding)
            await holding.offered.arrivals.wait_for(there, f"what {name} is filled with")

    async def manifest(
        self, name: str, generation: str, rank: int, *, staged: bool = False, epoch: int = 0
    ) -> Manifest:
        """Returns one rank's manifest; see `Holding.manifest`.

        That of weights which are still coming it waits for. Raises `NotYet` after a second.
        """
        holding = self.get(name, generation)
        what = f"the manifest that {name} is filled with"
        await holding.offered.arrivals.wait_for(partial(_knows_blocks, holding, epoch), what)
        return holding.manifest(rank, staged=staged, epoch=epoch)

    def _check_seats(self, holding: Holding, holder: str) -> None:
        readers = self.leases.holders(holding.name, holding.generation)
        if ahead := holding.seats.send_on(readers, holder):
            offer = holding.offered.now
            line = holding.seats.line_of(ahead, readers)
            upstream = (*line, holding.name, *(offer.upstream if offer else ()))
            raise SourceBusy(
                f"{holding.name} is busy: {ahead} reads from it",
                next=ahead, manifest=holding.seats.manifest_holder(holder) or holding.name,
            ).knowing(upstream, offer.probe if offer else holding.probe)  # fmt: skip

    def leased(self, lease: str) -> tuple[Lease, Holding]:
        """Returns a live lease and what it is on. Raises `LeaseEnded` or `NotFound`."""
        used = self.leases.use(lease)
        kept = [one.holding for one in self.kept]
        for holding in [*self._attached.values(), *kept, *self._leaving]:
            if (holding.name, holding.generation) == (used.instance, used.generation):
                return used, holding
        raise NotFound(f"{used.instance} has gone")

    def grant(self, lease: str, rank: int, runs: Sequence[Run]) -> Grant:
        """Describes what may be read under a lease on a connection of its own.

        Raises `LeaseEnded`, `EpochChanged`, `NotFound` for an unknown rank and `InvalidRequest`
        for blocks that there aren't.
        """
        held, holding = self.leased(lease)
        manifest = holding.manifest(rank, epoch=held.epoch)
        check_runs(runs, manifest.block_count)
        return Grant(lease, held.instance, held.generation, held.epoch, rank, tuple(runs))

    async def arrival(self, lease: str, rank: int, index: int) -> None:
        """Waits for a block that an incomplete instance has yet to verify.

        Raises `NotYet` after a second, `EpochChanged`, and what `leased` does.
        """
        used, holding = self.leased(lease)
        await holding.offered.arrival(rank, index, used.epoch)

    def artifact(self, sha256: str) -> bytes:
        """Returns an artifact that an attached instance offers. Raises `NotFound`."""
        for holding in self._attached.values():
            if sha256 in holding.artifacts:
                return holding.artifacts[sha256][1]
        raise NotFound(f"no artifact {sha256} is offered here", field="sha256", found=sha256)

    def _in_use(self, holding: Holding) -> bool:
        return bool(self.leases.count(holding.name, holding.generation))


def _is_filled(holding: Holding) -> bool:
    return bool(holding.offered.now) or not holding.state.fillable


def _knows_blocks(holding: Holding, epoch: int) -> bool:
    """Whether the digests of the blocks at an epoch are known; `FILLING_EPOCH` is any."""
    if offer := holding.offered.at(epoch):
        return bool(offer.manifests)
    return epoch != FILLING_EPOCH or not holding.state.fillable


def _committed(holding: Holding, epoch: int, digest: str) -> int:
    """Returns at which epoch an instance holds what was announced, as coming or as there."""
    name = holding.name
    if holding.state is State.UPDATING:
        raise EpochChanged(f"{name} is being updated", field="state", found=State.UPDATING)
    if holding.changing_to:
        raise EpochChanged(
            f"{name} is about to change to {holding.changing_to}",
            field="weight_version", found=holding.weights.version, expected=holding.changing_to,
            hint="ask for the new weights in a moment",
        )  # fmt: skip
    if not holding.state.holds_weights:
        raise WrongState(f"{name} is {holding.state}: it holds no complete weights")
    announced = epoch in (0, holding.weights.epoch) or epoch > FILLING_EPOCH
    if not announced or holding.weights.digest != digest:
        raise EpochChanged(
            f"{name} holds other weights by now",
            field="epoch", expected=str(epoch), found=str(holding.weights.epoch),
        )  # fmt: skip
    return holding.weights.epoch
