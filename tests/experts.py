"""Experts on two groups of two ranks without processes, and somebody who recovers them."""

import asyncio
import dataclasses
import random

from fakes import verified

from engine_service.core.expert_map import ExpertMap, RankExperts
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    Member,
    Membership,
    MembershipState,
    PulledUnit,
)
from relay_service.core.dtypes import DType
from relay_service.core.instance import Weights
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import weights_digest

LAYERS, EXPERTS, GROUPS, PARTS = (1, 2), 4, 2, 2
SPREAD = ((0, 1, 2), (3, 0, 1))
WHOLE = Membership(
    epoch=1, state=MembershipState.WHOLE,
    members=tuple(Member(rank, rank // PARTS, 100 + rank) for rank in range(GROUPS * PARTS)),
)  # fmt: skip
ROUTED = Membership(
    epoch=2, state=MembershipState.ROUTED, members=WHOLE.members[:PARTS], groups_lost=1,
    lost={1: (3,), 2: (3,)}, reason="rank 2 was killed",
)  # fmt: skip
STEPS = (
    ExpertProgress(phase="starting"),
    ExpertProgress(phase="pulling", bytes_done=64, bytes_total=128, source="seed", note="slow"),
)
REPORT = ExpertReport(
    pulled=(
        PulledUnit("layer.1.expert.3", 0, 64, "relay:seed"),
        PulledUnit("layer.2.expert.3", 1, 60, "disk:/models/m"),
    ),
    bytes_copied=512, experts_moved=3, ranks_started=2, seconds_started=1.5, seconds_pulled=0.25,
    seconds_paused=0.125, seconds=2.5,
)  # fmt: skip


def layout(experts: RankExperts, rank: int):
    """Lays out the experts of a rank, and a unit that all hold."""
    names = [f"layer.{n}.expert.{e}" for n in LAYERS for e in experts.slots(n)]
    specs = [UnitSpec(n, (TensorSpec(f"{n}.down", DType.U8, (64,), logical=n),)) for n in names]
    dense = UnitSpec("dense", (TensorSpec("dense", DType.U8, (8,)),))
    return lay_out(rank, [dense, *specs])


def contents(layout, part: int) -> bytes:
    """Returns bytes that depend on what a unit is called, not on where it lies."""
    data = bytearray(layout.data_bytes)
    for unit in layout.units:
        drawn = random.Random(f"{unit.name} {part}").randbytes(unit.nbytes)  # noqa: S311
        data[unit.offset : unit.offset + unit.nbytes] = drawn
    return bytes(data)


def fresh(placed: ExpertMap) -> list:
    """Returns the manifests of ranks that hold experts as a map says."""
    groups = len(placed.layers[LAYERS[0]])
    layouts = [layout(RankExperts(placed, n // PARTS), n) for n in range(groups * PARTS)]
    return [verified(one, contents(one, n % PARTS)) for n, one in enumerate(layouts)]


def spread(instance, experts: ExpertMap | None = None) -> None:
    """Lets an instance hold experts, by default all of them and two of them twice."""
    instance.experts = experts or ExpertMap(EXPERTS, dict.fromkeys(LAYERS, SPREAD))
    groups = len(instance.experts.layers[LAYERS[0]])
    instance.config = dataclasses.replace(
        instance.config, tensor_parallel_size=PARTS, expert_parallel_size=groups,
        redundant_experts=2,
    )  # fmt: skip
    instance.manifests = fresh(instance.experts)
    instance.engine.weights = Weights("v1", weights_digest(instance.manifests), 1)


class FakeRecovery:
    """Makes the instance whole again, without ranks; waits for `may_end` before it does."""

    def __init__(self, instance) -> None:
        self.instance = instance
        self.progress = None
        self.asked = []
        self.error: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def recover(self, options, on_progress):
        """Recovers."""
        return await self._whole(options, on_progress)

    async def scale(self, groups, on_progress):
        """Scales."""
        return await self._whole(groups, on_progress)

    async def _whole(self, asked, on_progress):
        self.asked.append(asked)
        return await asyncio.shield(asyncio.ensure_future(self._change(on_progress)))

    async def _change(self, on_progress):
        for self.progress in STEPS:
            on_progress(self.progress)
        await self.may_end.wait()
        self.progress = None
        if self.error:
            raise self.error
        spread(self.instance)
        self.instance.membership = dataclasses.replace(WHOLE, epoch=3)
        return REPORT
