"""An engine service over ranks that compute a tiny model as threads of this process."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from engines import LIMITS, FakeRanks, Service
from rank_threads import Ranks

from engine_service.core.check_messages import DigestWeights
from engine_service.core.expert_messages import DropExperts, MoveExperts, StageExperts
from engine_service.core.replies import quiet
from engine_service.core.scheduler import Limits
from engine_service.core.step_messages import Step
from engine_service.core.update_messages import ApplyUpdate, StagingCommand
from relay_service.core.instance import Weights
from relay_service.core.manifest import weights_digest

SETTINGS = {"kv_blocks": 32, "kv_block_tokens": 4}
"""Those of the service's scheduler."""


class ServedRanks(FakeRanks):
    """Gives commands to real ranks, all in one order as a group of processes would."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._ordered = asyncio.Lock()
        self.arenas = [rank.allocated() for rank in ranks.ranks]
        self.order: list[type] = []
        """Kinds of the commands so far."""
        self.before_piece: Callable[[int], Awaitable[None]] | None = None
        """Called before each piece of a check with how many there were."""
        self.staging_progress = [(0, 0)] * len(ranks.ranks)

    async def step(self, rows):
        """Runs a step."""
        self.stepping.set()
        return (await self.same(Step(rows), None))[0]

    async def same(self, command, kind):
        """Gives every rank the same command."""
        return await self.all([command] * len(self._ranks.ranks), kind)

    async def in_time(self, command, kind, seconds):
        """Gives every rank the same command, for which it has so long."""
        async with asyncio.timeout(seconds):
            return await self.same(command, kind)

    async def all(self, commands, kind):
        """Gives each rank its command."""
        if self.before_piece and isinstance(commands[0], DigestWeights):
            await self.before_piece(self.order.count(DigestWeights))
        return await asyncio.shield(quiet(asyncio.ensure_future(self._all(commands))))

    async def stage(self, commands, kind):
        """Gives each rank a command that stages weights; no step runs meanwhile."""
        return await self.all(commands, kind)

    async def stage_same(self, command, kind):
        """Gives every rank the same one."""
        return await self.same(command, kind)

    async def _all(self, commands):
        async with self._ordered:
            self.order.append(type(commands[0]))
            given = dict(zip(map(id, self._ranks.ranks), commands, strict=True))
            answers = await asyncio.to_thread(
                self._ranks.each, lambda rank: _answer(rank, given[id(rank)])
            )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def _answer(rank, command):
    match command:
        case Step():
            return rank.step(command.rows)
        case DigestWeights():
            return rank.checker.answer(command)
        case StageExperts() | MoveExperts() | DropExperts():
            return rank.experts.answer(command)
        case ApplyUpdate():
            return rank.staging.apply()
        case _ if isinstance(command, StagingCommand):
            return rank.staging.answer(command)
    raise AssertionError(command)


def served(
    ranks: Ranks, name: str = "one", limits: Limits = LIMITS, blocks: int = SETTINGS["kv_blocks"]
) -> Service:
    """Returns a service, not started yet, of ranks that serve a folder's weights.

    Its scheduler has so many blocks; the ranks need as many.
    """
    service = Service(limits, blocks)
    instance, group = service.instance, ServedRanks(ranks)
    instance.identity = dataclasses.replace(instance.identity, name=name)
    instance.ranks = service.ranks = instance.engine._runner = group
    instance.config = dataclasses.replace(
        instance.config, tensor_parallel_size=ranks.tp, expert_parallel_size=ranks.ep,
        redundant_experts=ranks.starts[0].config.redundant_experts,
    )  # fmt: skip
    instance.manifests = list(ranks.loaded)
    instance.experts = group.arenas[0].experts
    instance.engine.weights = Weights("v1", weights_digest(ranks.loaded), 1)
    return service
