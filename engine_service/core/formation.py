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
from engine_service.core.expert_moves import known
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
        self.instance = instance
        self.known: list[Manifest] = []
        """By rank: what the instance held when it was whole."""
        self._digests: Digests = {}
        self._epoch, self._wanted = 1, instance.config.expert_parallel_size
        self.sound = True
        """Whether what the instance says that ranks hold is what they do."""

    @property
    def experts(self) -> ExpertMap:
        """Where the experts lie. Raises `WrongState` for a model without."""
        return known(self.instance)

    @property
    def parts(self) -> int:
        """Tensor-parallel ranks of each group."""
        return self.instance.config.tensor_parallel_size

    def begin(self) -> None:
        """Takes down what the whole instance holds; while experts are lost, that is remembered."""
        instance = self.instance
        if not self.sound or instance.experts is None or instance.experts.lost:
            return
        self.known = list(instance.manifests)
        self._digests = {
            (rank % self.parts, unit.name): unit.digests
            for rank, manifest in enumerate(instance.manifests)
            for unit in manifest.units
        }

    async def form(self, experts: ExpertMap, *, routes: bool = False) -> None:
        """Has all ranks compute together, with the experts in the slots of a map.

        Within `between_steps`. With `routes`, rows pass over experts that nobody holds. Raises
        `RankDied` when a rank is lost on the way; `instance.experts` says what the others hold
        then.
        """
        instance, ranks = self.instance, self.instance.ranks
        self._epoch += 1  # used once, also where it comes to nothing: so nobody meets the past
        members, seconds = len(ranks.workers), instance.config.patience_seconds
        met = [Rejoin(f"m{self._epoch}", rank, members) for rank in range(members)]
        await ranks.all_in_time(met, Done, seconds)
        self.sound = False
        instance.experts = experts  # whoever answers has placed them, whatever becomes of others
        places = [Place(experts, rank, routes) for rank in range(members)]
        placed = await ranks.all_in_time(places, Placed, seconds)
        self._follow([reply.manifest for reply in placed])
        self.sound = True
        await ranks.in_time(Capture(), Captured, seconds)

    def say(self, reason: str = "", *, routes: bool = False) -> None:
        """Says who computes together, once they do; without a reason they are whole."""
        lost = self.experts.lost
        if not reason:
            self._wanted = self.experts.groups
        groups_lost = max(0, self._wanted - self.experts.groups)
        if lost:
            state = MembershipState.ROUTED if routes else MembershipState.HELD
        else:
            state = MembershipState.DEGRADED if groups_lost else MembershipState.WHOLE
        self.instance.membership = Membership(
            epoch=self._epoch, state=state, groups_lost=groups_lost, lost=lost, reason=reason,
            members=members_of(self.instance.ranks.workers, self.parts),
        )  # fmt: skip

    def note(self, reason: str) -> None:
        """Says why what was lost is not back."""
        instance = self.instance
        if instance.membership:
            instance.membership = replace(instance.membership, reason=reason)

    def _named(self, part: int, manifest: Manifest) -> Manifest:
        def known(unit: Unit) -> Unit:
            return msgspec.structs.replace(unit, digests=self._digests[part, unit.name])

        units = tuple(map(known, manifest.units))
        return msgspec.structs.replace(manifest, units=units)

    def _follow(self, manifests: Sequence[Manifest]) -> None:
        """Says what lies where now. The weights are the same, and so is KV."""
        instance, weights = self.instance, self.instance.engine.weights
        instance.manifests = [self._named(rank % self.parts, m) for rank, m in enumerate(manifests)]
        digest = weights_digest(instance.manifests)
        instance.engine.weights = Weights(
            weights.version, digest, weights.epoch + 1, weights.kv_origin or kv_origin(weights)
        )
