"""One rank: a model in its arena, with cache, graphs and runner. Answers the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine_service.core import messages
from engine_service.core.member_messages import ReadUnits, Rejoin, UnitsRead
from engine_service.core.step_messages import Row, Sampled
from engine_service.device import probe
from engine_service.device.audit import audit
from engine_service.device.checking import WeightChecker
from engine_service.device.devices import open_device
from engine_service.device.expert_moves import ExpertMover
from engine_service.device.intake import LoadOptions
from engine_service.device.kv_cache import KVCache
from engine_service.device.loading import load
from engine_service.device.meeting import join
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Llama
from engine_service.device.parallel import Group, Groups, leave
from engine_service.device.plan import Plan, plan
from engine_service.device.runner import Runner
from engine_service.device.settling import Settler
from engine_service.device.sharding import Shard, rank_config
from engine_service.device.staging import Staging
from engine_service.device.tolerance import tolerance
from engine_service.device.unit_reading import read_units
from engine_service.errors import CollectiveFailed, ConfigError, WrongState

Progress = Callable[[int, int], None]


class Rank:
    """Everything that one worker process serves with."""

    def __init__(
        self, start: messages.Start, rendezvous_fd: int = -1, planned: Plan | None = None
    ) -> None:
        """Builds this rank's part on an arena of zeros, and meets the others unless it joins later.

        `rendezvous_fd` is where several ranks meet, `planned` what was planned for `start`
        already. Raises what `plan` does, `ConfigError` for a device that isn't there, and
        `CollectiveFailed` when another rank stays away.
        """
        settings, planned = start.config, planned or plan(start)
        self._settings, self._rendezvous_fd = settings, rendezvous_fd
        self._met_as, self._void = "", False
        self._captured: tuple[bool, Tensor | None] | None = None
        self.config, self.dtype = planned.config, planned.dtype
        self.facts, self.layout = planned.facts, planned.layout
        self.device = device = open_device(settings, planned.memory)
        self.arena = device.allocate(planned.manifest, settings.generation)
        self._settler = Settler(self.arena)
        own = rank_config(planned.config, planned.shard)
        self.groups = groups = Groups.lonely()
        groups.follow(self._apart if settings.joins_later else self.meet())
        self.model = Llama(own, self.arena.tensors, groups, planned.layout, planned.shard.experts)
        self.experts = ExpertMover(planned, self.arena, self.model, groups.world)
        self.checker = WeightChecker(self.arena, self.model.weights)
        self.cache = KVCache(
            own, planned.dtype, settings.kv_blocks, settings.kv_block_tokens, device.torch
        )
        self.graphs = device.graphs(self.model, self.cache)
        self.runner = Runner(self.model, self.cache, self.graphs)
        self.staging = Staging(self)

    @property
    def shard(self) -> Shard:
        """What this rank holds of the model."""
        return self.experts.shard

    @property
    def generation(self) -> str:
        """The life of the instance."""
        return self._settings.generation

    def meet(self, name: str = "") -> Groups:
        """Meets the other ranks, in groups of that name. Raises `CollectiveFailed`."""
        life = ".".join(filter(None, (self.generation, self._met_as, name)))
        settings = msgspec.structs.replace(self._settings, generation=life)
        return join(settings, self._rendezvous_fd, self.device.meet)

    @property
    def _apart(self) -> Groups:
        """What its groups are while it has not met the others."""
        settings, parts = self._settings, self._settings.tensor_parallel_size
        rank = settings.rank
        return Groups(Group(rank % parts, parts), Group(rank, settings.world_size))

    @property
    def outlives_peers(self) -> bool:
        """Whether it goes on when another rank is lost."""
        return self._settings.outlives_peers and self.arena.whole

    def part(self) -> None:
        """Leaves the others: whatever needs them raises `CollectiveFailed` until `rejoin`."""
        leave(self.groups)

    def rejoin(self, command: Rejoin) -> None:
        """Leaves the groups so far and meets other ranks; no step runs until `capture`.

        Raises `ConfigError` for a number that cannot be this rank's, `WrongState` where weights
        were left half-changed, `CollectiveFailed` when a rank stays away: none has met then.
        """
        settings, parts = self._settings, self.shard.ranks
        rank, size = command.rank, command.world_size
        if size % parts or not 0 <= rank < size or rank % parts != self.shard.rank:
            raise ConfigError(f"rank {rank} of {size} cannot be this one", field="rank")
        if not self.arena.whole:
            raise WrongState("the weights were left half-changed")
        self._settings = msgspec.structs.replace(
            settings, rank=rank, world_size=size, expert_parallel_size=size // parts
        )
        self._met_as, self._void = command.name, True
        self.staging.outlive()
        self.groups.follow(self._apart)
        self.groups.follow(self.meet())
        try:
            # Whoever has its sum knows that all are there.
            self.groups.world.all_reduce(torch.zeros(1, device=self.device.torch))
        except CollectiveFailed:
            self.part()
            raise

    def allocated(self) -> messages.Allocated:
        """Describes the arena, whose descriptors are `arena.descriptors`."""
        arena = self.arena
        return messages.Allocated(
            manifest=arena.manifest,
            facts=self.facts,
            max_positions=self.config.max_positions,
            address=arena.address,
            page_kind=arena.page_kind,
            descriptors=len(arena.descriptors),
            experts=self.shard.experts.map if self.shard.experts else None,
        )

    def capture(self) -> None:
        """Audits what a pass reads, then captures it. Weights may land meanwhile.

        What was captured before serves on where a pass is the same as it was then. Raises
        `ArenaError` for a tensor outside the arena, `CaptureError`.
        """
        shares = self.groups.world.rank < self.groups.tensor.ranks  # as the layers ask
        before, now = self._captured, (shares, self.model.lost)
        if before is None or before[0] != now[0] or before[1] is not now[1]:
            audit(self.model, self.arena, self.cache)
            self.graphs.capture()
            self._captured = now
        self._void = self._void and not self.groups.met

    def load(
        self, folder: Path, progress: Progress, *, narrow: bool = True, bytes_per_second: int = 0
    ) -> messages.Loaded:
        """Fills the arena from a checkpoint and seals it.

        `narrow` and `bytes_per_second` are those of `LoadDisk`. Raises `CheckpointError`, and
        `WrongState` when the weights already serve.
        """
        if self.arena.sealed:
            raise WrongState("the arena is sealed: its weights serve")
        manifest, report = load(
            self.arena,
            folder,
            llama_format.checkpoint_slices(self.config, self.shard, self.layout),
            llama_format.computed_tensors(self.config),
            self.model.matrices(),
            options=LoadOptions(
                unread=llama_format.unread_by(self.config, self.shard),
                narrow=narrow, bytes_per_second=bytes_per_second,
            ),
            progress=progress,
        )  # fmt: skip
        self.arena.seal()
        return messages.Loaded(manifest, report)

    def read_units(self, fd: int, command: ReadUnits, progress: Progress) -> UnitsRead:
        """See `unit_reading.read_units`."""
        return read_units(self, fd, command, progress)

    def step(self, rows: tuple[Row, ...]) -> Sampled:
        """Runs a batch. Raises `WrongState` while the weights are not committed."""
        if not (self.arena.sealed and self.arena.whole):
            raise WrongState("the weights are not committed: nothing is served from them")
        if self._void or self.experts.unserved:
            raise WrongState("the ranks have met anew, and are not ready to compute together")
        sampled = self.runner.step(rows)
        news = self._settler.news()
        return msgspec.structs.replace(sampled, page_kind=news) if news else sampled

    def record_probe(self) -> messages.Recorded:
        """Runs and records the probe.

        Raises `ProbeMismatch` when graphs that were not proven at capture compute otherwise.
        """
        recorded = probe.record(self.runner, self.cache, self.config.vocab_size)
        if not self.graphs.proven:
            self.check_probe(recorded)
        return messages.Recorded(recorded)

    def check_probe(self, recorded: bytes, steps: int | None = None) -> None:
        """Raises `ProbeMismatch` when the weights compute something else, in so many steps."""
        known = self.runner, self.cache, self.config.vocab_size
        probe.check(recorded, *known, self.tolerance, steps)

    @property
    def tolerance(self) -> float:
        """How far logits of the same weights may lie apart, relative to the largest one."""
        return max(tolerance(self.model.embedding.embed.dtype), self.layout.tolerance)
