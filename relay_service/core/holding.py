"""One attached life of an instance: what it holds, and the mappings of its arenas.

Plain Python. A holding outlives its engine while leases read from it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from relay_service.core.attachment import ARTIFACT_NAMES, MAX_ARTIFACT_BYTES, Attach, Update
from relay_service.core.instance import (
    Artifact,
    Instance,
    RankBlocks,
    State,
    Weights,
    verified_digest,
)
from relay_service.core.layout import check
from relay_service.core.manifest import Manifest
from relay_service.core.ports import Arena, MapArena
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.errors import EpochChanged, InvalidRequest, NotFound, Refused, WrongState


class Holding:
    """An attached instance. Owns its descriptors and mappings."""

    def __init__(self, attach: Attach, descriptors: list[int], map_arena: MapArena) -> None:
        """Takes the descriptors over, also when it raises.

        Raises `ManifestError`, `InvalidRequest` or `Refused` for an attachment
        that contradicts itself.
        """
        self._descriptors = descriptors
        self._map_arena = map_arena
        self._readers: list[Arena] = []
        self._sequences: list[int] = []
        """Of each arena, while it holds what its manifest says."""
        self._writers: list[Arena] = []
        self._reads = 0
        self._lock = threading.Lock()
        self.attach = attach
        self.model = attach.model
        self.placement = attach.placement
        self.state = State.STARTING
        self.weights = attach.weights
        self.manifests = list(attach.manifests)
        self.probe = attach.probe
        self.receivers: list[Receiver] = []
        self.landed = Landed()
        self.detached = False
        try:
            self._check_attach()
            self.apply(
                Update(
                    model=attach.model,
                    state=attach.state,
                    weights=attach.weights,
                    probe=attach.probe,
                )
            )
        except BaseException:
            self.detached = True
            self.close()
            raise
        self.artifacts = {
            hashlib.sha256(data).hexdigest(): (name, data)
            for name, data in attach.artifacts.items()
        }

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.attach.instance

    @property
    def generation(self) -> str:
        """Life of the instance."""
        return self.attach.generation

    def record(self, address: str, leases: int) -> Instance:
        """Describes the holding as it is announced."""
        return Instance(
            instance=self.name, generation=self.generation, model=self.model,
            state=self.state, format=self.attach.format, placement=self.placement,
            weights=self.weights, address=address, leases=leases,
            ranks=tuple(self._rank_blocks(rank) for rank in range(len(self.manifests))),
            artifacts=tuple(
                Artifact(name, len(data), sha) for sha, (name, data) in self.artifacts.items()
            ),
        )  # fmt: skip

    def apply(self, update: Update) -> None:
        """Follows the engine. Raises `Refused` for weights that are not proven."""
        manifests = list(update.manifests) or self.manifests
        if len(manifests) != len(self.manifests):
            raise InvalidRequest(f"{len(manifests)} manifests for {len(self.manifests)} ranks")
        for old, new in zip(self.manifests, manifests, strict=True):
            check(new)
            # Experts that were moved leave every extent as it is, and make a new epoch.
            moved = self.state.holds_weights and update.weights.epoch > self.weights.epoch
            compared = old.extent_difference if moved else old.layout_difference
            if difference := compared(new):
                raise Refused(f"the arena has changed: {difference}")
        if update.state.holds_weights:
            if self._writers:
                raise WrongState("the writable mapping has not been returned")
            if not verified_digest(manifests, update.weights.digest):
                raise Refused("the manifests do not carry the weights that the engine claims")
            self._readers = self._readers or self._map(writable=False)
            self.receivers, self.landed = [], Landed()
        self.manifests, self.probe = manifests, update.probe or self.probe
        self._follow(update.state, update.weights)
        self.model = update.model or self.model
        self.placement = update.placement or self.placement

    def open_receivers(self) -> list[Receiver]:
        """Maps the arenas for writing and returns their receivers, one per rank.

        Blocks that landed before are kept. Raises `WrongState` for an instance
        that serves, or that somebody fills already.
        """
        if not self.state.fillable or self.detached:
            raise WrongState(
                f"{self.name} is {self.state}: only a dummy can be filled",
                field="state", expected="DUMMY", found=str(self.state),
            )  # fmt: skip
        if self._writers:
            raise WrongState(f"{self.name} is being filled already")
        self._writers = self._map(writable=True)
        landed: list[list[bytes] | None] = [r.verified for r in self.receivers]
        landed = landed or [None] * len(self.manifests)
        self.receivers = [
            Receiver(manifest.without_digests(), arena, verified)
            for manifest, arena, verified in zip(self.manifests, self._writers, landed, strict=True)
        ]
        return self.receivers

    def return_mapping(self) -> int:
        """Unmaps the arenas for writing; returns how many were mapped."""
        writers, self._writers = self._writers, []
        for arena in writers:
            arena.close()
        return len(writers)

    @contextmanager
    def reading(self, rank: int, epoch: int) -> Iterator[Arena]:
        """Lends a rank's arena for one read.

        Raises `EpochChanged` when the weights are, or became, others than those
        of `epoch`; that comes before whatever the reader made of the bytes.
        """
        arena, known = self._begin_read(rank, epoch)
        before = arena.sequence
        try:
            if before % 2 or before != known:  # or was, and we have not heard of it yet
                raise EpochChanged(f"{self.name} is being updated")
            yield arena
        finally:
            changed = arena.sequence != before
            self._end_read()
            if changed:
                raise EpochChanged(f"{self.name} was updated while it was read")

    def close(self) -> bool:
        """Lets go of memory and descriptors once it is detached and nobody reads.

        Returns whether it did.
        """
        with self._lock:
            if self._reads or not self.detached:
                return False
            self.return_mapping()
            for arena in self._readers:
                arena.close()
            self._readers = []
            while self._descriptors:
                os.close(self._descriptors.pop())
        return True

    def manifest(self, rank: int) -> Manifest:
        """Returns one rank's manifest. Raises `NotFound`."""
        if not 0 <= rank < len(self.manifests):
            raise NotFound(f"{self.name} has no rank {rank}", field="rank", found=str(rank))
        return self.manifests[rank]

    def _check_attach(self) -> None:
        attach = self.attach
        expected = len(attach.manifests) * attach.descriptors_per_rank
        if len(self._descriptors) != expected or not attach.manifests:
            raise InvalidRequest(
                f"{len(attach.manifests)} ranks, {len(self._descriptors)} descriptors"
            )
        for rank, manifest in enumerate(attach.manifests):
            if manifest.rank != rank:
                raise InvalidRequest(f"manifest of rank {manifest.rank} stands at {rank}")
            check(manifest)
        for name, data in attach.artifacts.items():
            if name not in ARTIFACT_NAMES or len(data) > MAX_ARTIFACT_BYTES:
                raise InvalidRequest(f"artifact {name[:64]!r} is not one that travels")

    def _map(self, *, writable: bool) -> list[Arena]:
        mapped: list[Arena] = []
        each = self.attach.descriptors_per_rank
        try:
            for rank, manifest in enumerate(self.manifests):
                descriptors = self._descriptors[rank * each : (rank + 1) * each]
                mapped.append(self._map_arena(descriptors, manifest.data_bytes, writable=writable))
                mapped[-1].check_header()
        except BaseException:
            for arena in mapped:
                arena.close()
            raise
        return mapped

    def _follow(self, state: State, weights: Weights) -> None:
        """Takes state and weights over; what is news of either is what the arenas hold now."""
        with self._lock:
            known = self.state.holds_weights and weights.epoch == self.weights.epoch
            if state.holds_weights and not known:
                self._sequences = [arena.sequence for arena in self._readers]
            self.state, self.weights = state, weights

    def _begin_read(self, rank: int, epoch: int) -> tuple[Arena, int]:
        with self._lock:
            if not 0 <= rank < len(self._readers):
                raise NotFound(f"{self.name} has no readable rank {rank}")
            if self.weights.epoch != epoch:
                raise EpochChanged(f"{self.name} is at epoch {self.weights.epoch}, not {epoch}")
            self._reads += 1
            return self._readers[rank], self._sequences[rank]

    def _end_read(self) -> None:
        with self._lock:
            self._reads -= 1

    def _rank_blocks(self, rank: int) -> RankBlocks:
        manifest = self.manifests[rank]
        blocks = manifest.block_count
        have = blocks if self.state.holds_weights else 0
        if self.receivers:
            have = self.receivers[rank].blocks_verified
        digest = manifest.digest if self.state.holds_weights else ""
        return RankBlocks(rank, have, blocks, manifest.data_bytes, digest)
