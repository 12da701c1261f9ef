"""Has the ranks of an instance compute together anew, with the experts where a map has them.

Rejoin → Place → Capture, on all ranks together and with no step in between. The first may
fail and has changed nothing; after the second the ranks hold what the map says. Whoever calls
this decides who they are. Plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from engine_service.core.expert_map import ExpertMap
from engine_service.core.instance import Instance
from engine_service.core.member_messages import Place, Placed, Rejoin
from engine_service.core.membership import Membership, MembershipState, members_of
from engine_service.core.messages import Capture, Captured, Done
from engine_service.core.prefix import kv_origin
from relay_service.core.instance import Weights
from relay_service.core.manifest import Manifest, Unit, weights_digest

Digests = dict[tuple[int, str], tuple[bytes, ...]]
"""Of the blocks of each unit, by tensor-parallel part and name."""


class Formation:
    """The decisions about one instance, each with a number."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.known: list[Manifest] = []
        """By rank: what the instance held when it was whole."""
        self._digests: Digests = {}
        self.sound = True
        """Whether what the instance says that ranks hold is what they do."""
        self._origin = ""
        """What computes KV when no expert is lost."""

    @property
    def parts(self) -> int:
        """Tensor-parallel ranks of each group."""
        return self._instance.config.tensor_parallel_size

    def begin(self) -> None:
        """Takes down what the whole instance holds; while experts are lost, that is remembered."""
        instance = self._instance
        if not self.sound or instance.experts is None or instance.experts.lost:
            return
        self.known = list(instance.manifests)
        self._digests = {
            (rank % self.parts, unit.name): unit.digests
            for rank, manifest in enumerate(instance.manifests)
            for unit in manifest.units
        }
        weights = instance.engine.weights
        self._origin = weights.kv_origin or kv_origin(weights)

    async def form(
        self, experts: ExpertMap, *, reason: str = "", groups_lost: int = 0, routes: bool = False
    ) -> None:
        """Has all ranks compute together, with the experts in the slots of a map.

        Within `between_steps`, or while no steps run. Raises `RankDied` when a rank is lost on
        the way; `instance.experts` says what the others hold then.
        """
        instance, ranks = self._instance, self._instance.ranks
        epoch = (instance.membership.epoch if instance.membership else 0) + 1
        # A number is used once, also where it comes to nothing: nobody meets those of before.
        self._say(epoch, groups_lost, reason, routes=routes)
        members, seconds = len(ranks.workers), self._instance.config.collective_timeout_seconds
        met = [Rejoin(f"m{epoch}", rank, members) for rank in range(members)]
        await ranks.all_in_time(met, Done, seconds + 1)
        self.sound = False
        instance.experts = experts  # whoever answers has placed them, whatever becomes of others
        places = [Place(experts, rank, routes) for rank in range(members)]
        placed = await ranks.all_in_time(places, Placed, seconds + 1)
        self._follow([reply.manifest for reply in placed], routes=routes)
        self.sound = True
        self._say(epoch, groups_lost, reason, routes=routes)
        await ranks.all_in_time([Capture()] * members, Captured, seconds + 1)

    def note(self, reason: str) -> None:
        """Says why what was lost is not back."""
        instance = self._instance
        if instance.membership:
            instance.membership = replace(instance.membership, reason=reason)

    def name(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Returns manifests of ranks, by rank, with the digests that their units must have."""
        return [self._named(rank % self.parts, manifest) for rank, manifest in enumerate(manifests)]

    def _named(self, part: int, manifest: Manifest) -> Manifest:
        def known(unit: Unit) -> Unit:
            return msgspec.structs.replace(unit, digests=self._digests[part, unit.name])

        units = tuple(map(known, manifest.units))
        return msgspec.structs.replace(manifest, units=units)

    def _follow(self, manifests: Sequence[Manifest], *, routes: bool) -> None:
        """Says what lies where now. The weights are the same; with lost experts, KV is not."""
        instance, weights = self._instance, self._instance.engine.weights
        instance.manifests = self.name(manifests)
        epoch = weights.epoch + 1
        instance.engine.weights = Weights(
            weights.version, weights_digest(instance.manifests), epoch,
            f"{self._origin}/routed/{epoch}" if routes else self._origin,
        )  # fmt: skip

    def _say(self, epoch: int, lost: int, reason: str, *, routes: bool) -> None:
        instance = self._instance
        gone = instance.experts.lost if instance.experts else {}
        if gone:
            state = MembershipState.ROUTED if routes else MembershipState.HELD
        else:
            state = MembershipState.DEGRADED if lost else MembershipState.WHOLE
        instance.membership = Membership(
            epoch=epoch, state=state, groups_lost=lost, lost=gone, reason=reason,
            members=members_of(instance.ranks.workers, self.parts),
        )  # fmt: skip
