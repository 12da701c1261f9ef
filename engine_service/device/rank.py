"""One rank: a model in its arena, with cache, graphs and runner. Answers the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_service.core import messages
from engine_service.device import probe
from engine_service.device.audit import audit
from engine_service.device.checking import WeightChecker
from engine_service.device.devices import open_device
from engine_service.device.expert_moves import ExpertMover
from engine_service.device.kv_cache import KVCache
from engine_service.device.loading import LoadOptions, load
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Llama
from engine_service.device.parallel import join
from engine_service.device.plan import Plan, plan
from engine_service.device.runner import Runner
from engine_service.device.sharding import Shard, rank_config
from engine_service.device.tolerance import tolerance
from engine_service.errors import WrongState

Progress = Callable[[int, int], None]


class Rank:
    """Everything that one worker process serves with."""

    def __init__(
        self, start: messages.Start, rendezvous_fd: int = -1, planned: Plan | None = None
    ) -> None:
        """Builds this rank's part on an arena of zeros, and meets the others.

        `rendezvous_fd` is where several ranks meet, `planned` what was planned for `start`
        already. Raises what `plan` does, `ConfigError` for a device that isn't there, and
        `CollectiveFailed` when another rank stays away.
        """
        settings, planned = start.config, planned or plan(start)
        self.config = planned.config
        self.facts, self.layout = planned.facts, planned.layout
        device = open_device(settings, planned.memory)
        self.arena = device.allocate(planned.manifest, settings.generation)
        own = rank_config(planned.config, planned.shard)
        groups = join(settings, rendezvous_fd, device.meet)
        self.model = Llama(own, self.arena.tensors, groups, planned.layout, planned.shard.experts)
        self.experts = ExpertMover(planned, self.arena, self.model, groups.world)
        self.checker = WeightChecker(self.arena, self.model.weights)
        self.cache = KVCache(
            own, planned.dtype, settings.kv_blocks, settings.kv_block_tokens, device.torch
        )
        self.graphs = device.graphs(self.model, self.cache)
        self.runner = Runner(self.model, self.cache, self.graphs)

    @property
    def shard(self) -> Shard:
        """What this rank holds of the model."""
        return self.experts.shard

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

        Raises `ArenaError` for a tensor outside the arena, `CaptureError`.
        """
        audit(self.model, self.arena, self.cache)
        self.graphs.capture()

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

    def step(self, rows: tuple[messages.Row, ...]) -> messages.Sampled:
        """Runs a batch. Raises `WrongState` while others could still write the weights."""
        if not self.arena.sealed:
            raise WrongState("the weights are not committed: nothing is served from them")
        return self.runner.step(rows)

    def record_probe(self) -> messages.Recorded:
        """Runs and records the probe.

        Raises `ProbeMismatch` when graphs that were not proven at capture compute otherwise.
        """
        recorded = probe.record(self.runner, self.cache, self.config.vocab_size)
        if not self.graphs.proven:
            self.check_probe(recorded)
        return messages.Recorded(recorded)

    def check_probe(self, recorded: bytes) -> None:
        """Raises `ProbeMismatch` when the weights compute something else."""
        limit = max(tolerance(self.model.embedding.embed.dtype), self.layout.tolerance)
        probe.check(recorded, self.runner, self.cache, self.config.vocab_size, limit)
