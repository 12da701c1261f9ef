"""Describes a holding as it is announced. Plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from relay_service.core.holding import Holding
from relay_service.core.instance import MAX_READERS, Artifact, Instance, RankBlocks, Reader, State
from relay_service.core.leases import Lease


def record(holding: Holding, address: str, leases: int, readers: Iterable[Lease] = ()) -> Instance:
    """Returns the record of an attached instance, which is found at `address`."""
    offer = holding.offered.now
    # Whoever looks for a source shall not come now, and shall come again.
    state = State.UPDATING if holding.changing_to else holding.state
    return Instance(
        instance=holding.name, generation=holding.generation, model=holding.model,
        state=state, format=holding.attach.format, placement=holding.placement,
        weights=holding.weights, address=address, leases=leases,
        ranks=tuple(_rank_blocks(holding, rank) for rank in range(len(holding.manifests))),
        artifacts=tuple(
            Artifact(name, len(data), sha) for sha, (name, data) in holding.artifacts.items()
        ),
        readers=tuple(
            Reader(one.holder, one.transfer, one.bytes_served)
            for one in islice(readers, MAX_READERS)
        ),
        filling=offer.filling if offer else None,
    )  # fmt: skip


def _rank_blocks(holding: Holding, rank: int) -> RankBlocks:
    manifest, whole = holding.manifests[rank], holding.is_whole(rank)
    have = manifest.block_count if whole else 0
    if holding.receivers:
        have = holding.receivers[rank].blocks_verified
    digest = manifest.digest if whole else ""
    return RankBlocks(rank, have, manifest.block_count, manifest.data_bytes, digest)
