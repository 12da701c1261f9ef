"""A relay's host in this process: ranks attach their arenas, and it fills those of dummies."""

import os
from typing import Self

from fakes import FakeFleet
from rank_threads import Ranks

from relay_service.core.attachment import Attach, Update
from relay_service.core.format import Format, Placement
from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.match import Target
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions, PullReport
from relay_service.core.rate import TokenBucket
from relay_service.memory.mapping import map_arena
from relay_service.transports.shm import ShmTransport


class Host:
    """Maps what is attached to it and copies through shared memory, as a relay does."""

    def __init__(self) -> None:
        self._holdings = Holdings()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holdings.close()

    def seed(self, name: str, ranks: Ranks, manifests: list[Manifest], probe: bytes) -> None:
        """Attaches an instance that serves."""
        weights = Weights("v1", weights_digest(manifests), 1)
        self._attach(name, ranks, State.READY, manifests, weights, probe)

    def dummy(self, name: str, ranks: Ranks) -> Holding:
        """Attaches an instance that shall be filled."""
        empty = [rank.arena.manifest for rank in ranks.ranks]
        return self._attach(name, ranks, State.DUMMY, empty, Weights(), b"")

    async def fill(self, target: Holding) -> PullReport:
        """Fills a dummy from whoever serves, and returns its memory. Raises what a pull does."""
        wanted = Target(target.name, target.attach.format, target.placement)
        fleet = FakeFleet(*self._holdings.records("127.0.0.1:1"))
        transports = [ShmTransport(self._holdings, TokenBucket())]
        options = PullOptions(timeout_seconds=60)
        receivers = target.open_receivers()
        try:
            return await Puller(
                wanted, receivers, fleet, transports, options, target.landed
            ).run()  # fmt: skip
        finally:
            target.return_mapping()

    def commit(self, target: Holding, report: PullReport) -> None:
        """Follows an engine that serves what has landed. Raises `Refused` if that isn't proven."""
        target.apply(
            Update(
                state=State.READY, weights=Weights("v1", report.weights_digest, 1),
                manifests=tuple(one.manifest() for one in target.receivers), probe=report.probe,
            )
        )  # fmt: skip

    def leave(self, instance: Holding) -> None:
        """Lets go of an instance and its memory."""
        self._holdings.detach(instance)

    def _attach(
        self, name: str, ranks: Ranks, state: State, manifests: list[Manifest],
        weights: Weights, probe: bytes,
    ) -> Holding:  # fmt: skip
        first, settings = ranks.ranks[0], ranks.starts[0].config
        where = first.shard.experts.map.digest if first.shard.experts else ""
        attach = Attach(
            instance=name, generation=f"life of {name}", model="tiny", state=state,
            format=Format(first.facts), weights=weights, manifests=tuple(manifests),
            placement=Placement(ranks.tp, ranks.ep, settings.redundant_experts, where),
            artifacts={}, probe=probe,
        )  # fmt: skip
        descriptors = [os.dup(fd) for rank in ranks.ranks for fd in rank.arena.descriptors]
        holding = Holding(attach, descriptors, map_arena)
        self._holdings.add(holding)
        return holding
