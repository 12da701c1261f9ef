"""One rank: a model in its arena, with cache, graphs and runner. Answers the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_service.core import messages
from engine_service.device import probe
from engine_service.device.arena import Arena
from engine_service.device.audit import audit
from engine_service.device.config import parse_config
from engine_service.device.dtypes import served_dtype
from engine_service.device.graphs import GraphRunner
from engine_service.device.kv_cache import KVCache
from engine_service.device.loading import load
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Llama
from engine_service.device.parallel import join
from engine_service.device.runner import Runner
from engine_service.device.sharding import Shard, check_divides, rank_config
from engine_service.device.tolerance import tolerance
from engine_service.errors import ConfigError, ModelError, WrongState
from relay_service.core.layout import lay_out

Progress = Callable[[int, int], None]


class Rank:
    """Everything that one worker process serves with."""

    def __init__(self, start: messages.Start, rendezvous_fd: int = -1) -> None:
        """Builds this rank's part on an arena of zeros, meets the others, audits what it reads.

        `rendezvous_fd` is where several ranks meet. Raises `ModelError` for a model that is
        not supported or cannot be split, `ConfigError` for a placement that isn't,
        `CollectiveFailed` when another rank stays away, `ArenaError` for a tensor outside
        the arena.
        """
        settings = start.config
        _check_placement(settings)
        if "config.json" not in start.files:
            raise ModelError("the model has no config.json", file="config.json")
        self.config = parse_config(start.files["config.json"])
        self.facts = llama_format.facts(self.config, settings.dtype)
        dtype = served_dtype(settings.dtype)
        self.shard = Shard(settings.rank, settings.world_size)
        check_divides(self.config, settings.world_size)
        specs = llama_format.unit_specs(self.config, dtype, self.shard)
        self.arena = Arena(lay_out(settings.rank, specs), settings.generation)
        own = rank_config(self.config, self.shard)
        self.model = Llama(own, self.arena.tensors, join(settings, rendezvous_fd))
        self.cache = KVCache(own, dtype, settings.kv_blocks, settings.kv_block_tokens)
        audit(self.model, self.arena, self.cache)
        self.graphs = GraphRunner(self.model, self.cache)
        self.runner = Runner(self.model, self.cache, self.graphs)

    def allocated(self) -> messages.Allocated:
        """Describes the arena, whose descriptor is `arena.fd`."""
        arena = self.arena
        return messages.Allocated(arena.manifest, self.facts, arena.address, arena.page_kind)

    def load(self, folder: Path, progress: Progress) -> messages.Loaded:
        """Fills the arena from a checkpoint and seals it.

        Raises `CheckpointError`, and `WrongState` when the weights already serve.
        """
        if self.arena.sealed:
            raise WrongState("the arena is sealed: its weights serve")
        manifest, bytes_read = load(
            self.arena,
            folder,
            llama_format.checkpoint_slices(self.config, self.shard),
            llama_format.computed_tensors(self.config),
            progress=progress,
        )
        self.arena.seal()
        return messages.Loaded(manifest, bytes_read)

    def step(self, rows: tuple[messages.Row, ...]) -> messages.Sampled:
        """Runs a batch. Raises `WrongState` while others could still write the weights."""
        if not self.arena.sealed:
            raise WrongState("the weights are not committed: nothing is served from them")
        return self.runner.step(rows)

    def record_probe(self) -> messages.Recorded:
        """Runs and records the probe."""
        return messages.Recorded(probe.record(self.runner, self.cache, self.config.vocab_size))

    def check_probe(self, recorded: bytes) -> None:
        """Raises `ProbeMismatch` when the weights compute something else."""
        limit = tolerance(self.model.embedding.embed.dtype)
        probe.check(recorded, self.runner, self.cache, self.config.vocab_size, limit)


def _check_placement(settings: messages.RankConfig) -> None:
    if settings.device != "cpu":
        raise ConfigError(
            f"device {settings.device} is not supported, only cpu",
            field="device", found=settings.device, expected="cpu",
        )  # fmt: skip
    if not 0 <= settings.rank < settings.world_size:
        raise ConfigError(f"there is no rank {settings.rank} of {settings.world_size}", field="tp")
