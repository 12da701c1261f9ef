"""What a relay knows of an instance: its life, its weights, its have-set."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from relay_service.core.format import Format, Placement
from relay_service.core.manifest import Manifest, weights_digest


class State(StrEnum):
    """Life of an instance. Only `READY` serves requests."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    DUMMY = "DUMMY"
    LANDING = "LANDING"
    READY = "READY"
    PAUSED = "PAUSED"
    UPDATING = "UPDATING"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def fillable(self) -> bool:
        """Whether bytes may land in the arena: nothing serves from it."""
        return self in (State.DUMMY, State.LANDING)

    @property
    def holds_weights(self) -> bool:
        """Whether the arena holds verified weights that others may read."""
        return self in (State.READY, State.PAUSED, State.DRAINING)

    @property
    def committed(self) -> bool:
        """Whether it has had verified weights; while it is `UPDATING` nobody may count on them.

        Who reads then is told by the sequence word of the arena whether they still lie there.
        """
        return self.holds_weights or self is State.UPDATING

    @property
    def updatable(self) -> bool:
        """Whether new weights may be staged beside those that the arena holds."""
        return self in (State.READY, State.PAUSED)


class RankBlocks(msgspec.Struct, frozen=True):
    """Have-set of one rank."""

    rank: int
    have_blocks: int
    blocks: int
    arena_bytes: int
    digest: str = ""


class Artifact(msgspec.Struct, frozen=True):
    """A small file that travels beside the weights, named by its SHA-256."""

    name: str
    nbytes: int
    sha256: str


class Filling(msgspec.Struct, frozen=True):
    """Which weights an incomplete instance will hold, and from whom they come."""

    model: str
    version: str
    digest: str
    epoch: int
    """At which its verified blocks are read; see `FILLING_EPOCH`."""
    source: str
    """Name of the instance that it reads from."""


class Reader(msgspec.Struct, frozen=True):
    """Somebody who holds a lease on an instance."""

    instance: str
    transfer: str
    bytes_served: int


class Weights(msgspec.Struct, frozen=True):
    """Which weights an instance holds. All empty for a dummy."""

    version: str = ""
    digest: str = ""
    epoch: int = 0
    kv_origin: str = ""
    """What KV says it was computed by; empty for epoch and digest."""


MAX_READERS = 64
FILLING_EPOCH = 1 << 40
"""Epochs of what isn't committed yet count from here, beyond all that an instance commits."""

Life = tuple[str, str, int]
"""Name, generation and epoch: what a source is left for. With new weights it's another one."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as its relay announces it."""

    instance: str
    generation: str
    model: str
    state: State
    format: Format
    placement: Placement
    weights: Weights
    ranks: tuple[RankBlocks, ...]
    artifacts: tuple[Artifact, ...] = ()
    address: str = ""
    """Address of the relay that serves its blocks."""
    leases: int = 0
    readers: tuple[Reader, ...] = ()
    """Who holds these leases, at most `MAX_READERS` of them."""
    filling: Filling | None = None
    """What others may read of it already; None for one that is complete, or isn't filled."""

    @property
    def have_blocks(self) -> int:
        """Verified blocks of all ranks."""
        return sum(rank.have_blocks for rank in self.ranks)

    def as_source(self) -> Instance:
        """Returns it as its readers see it: an incomplete one with the weights that it will hold.

        Its model is called what those weights are: a dummy may be called anything.
        """
        if not self.filling or not self.state.fillable:
            return self
        coming = self.filling
        weights = Weights(coming.version, coming.digest, coming.epoch)
        return msgspec.structs.replace(self, model=coming.model, weights=weights)

    @property
    def life(self) -> Life:
        """What it is as a source."""
        return self.instance, self.generation, self.weights.epoch


def verified_digest(manifests: list[Manifest], claimed: str) -> bool:
    """Returns whether manifests carry exactly the weights that somebody claims."""
    return bool(claimed) and weights_digest(manifests) == claimed
