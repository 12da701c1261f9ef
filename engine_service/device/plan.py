"""Plans a rank and allocates its memory. Free of torch, so that it need not wait for it.

Importing torch takes more than a second; the kernel zeroes the arena's pages meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_service.core import messages
from engine_service.core.expert_map import RankExperts
from engine_service.core.rank_config import RankConfig
from engine_service.device.config import ModelConfig, parse_config
from engine_service.device.dtypes import served_dtype
from engine_service.device.formats.layouts import Layout, choose_layout
from engine_service.device.models import llama_format
from engine_service.device.sharding import Shard, check_divides, place_experts
from engine_service.device.taking import TakenUnits
from engine_service.errors import ConfigError, InvalidRequest, ModelError
from relay_service.core.dtypes import DType
from relay_service.core.layout import lay_out
from relay_service.core.manifest import Manifest
from relay_service.memory.host import HostArena, create_memfd

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Memory:
    """An arena's memory, all zero, and where it is mapped."""

    fd: int
    mapping: HostArena


@dataclass(frozen=True)
class Plan:
    """What a rank serves, and the memory for it."""

    config: ModelConfig
    dtype: DType
    shard: Shard
    layout: Layout
    manifest: Manifest
    """Without digests."""
    memory: Memory | None
    """None for a rank whose memory lies on a device; torch's driver comes first there."""
    facts: tuple[tuple[str, str], ...]
    """What decides what the bytes mean."""
    taken: TakenUnits = field(default_factory=TakenUnits)
    """What the rank has taken out of other memory."""

    def allocated(self, memory: Memory) -> messages.Allocated:
        """Describes the arena before anything is built on it."""
        return messages.Allocated(
            manifest=self.manifest,
            facts=self.facts,
            max_positions=self.config.max_positions,
            address=memory.mapping.address,
            page_kind=memory.mapping.page_kind(),
            descriptors=1,
            experts=self.shard.experts.map if self.shard.experts else None,
        )


def allocate(manifest: Manifest, generation: str) -> Memory:
    """Allocates an arena. Raises `relay_service.errors.ResourceExhausted`."""
    fd = create_backing(manifest)
    mapping = HostArena(fd, manifest.data_bytes, writable=True)
    mapping.write_header(generation)
    return Memory(fd, mapping)


def create_backing(manifest: Manifest) -> int:
    """Creates what backs an arena in host memory; returns its descriptor."""
    return create_memfd(f"seedrelay-rank-{manifest.rank}", manifest.data_bytes)


def plan(start: messages.Start) -> Plan:
    """Lays out this rank's part of a model and allocates it.

    Raises `ModelError` for a model that is not supported or cannot be split, `ConfigError`
    for a placement or an expert map that isn't, `relay_service.errors.ResourceExhausted`.
    """
    settings = start.config
    _check_placement(settings)
    if "config.json" not in start.files:
        raise ModelError("the model has no config.json", file="config.json")
    config, dtype = parse_config(start.files["config.json"]), served_dtype(settings.dtype)
    shard = _shard(config, settings)
    layout = choose_layout(settings.weight_format, dtype, settings.device)
    manifest = lay_out(settings.rank, llama_format.unit_specs(config, dtype, shard, layout))
    memory = allocate(manifest, settings.generation) if settings.device == "cpu" else None
    facts = llama_format.facts(config, settings.dtype, layout)
    return Plan(config, dtype, shard, layout, manifest, memory, facts)


def _shard(config: ModelConfig, settings: RankConfig) -> Shard:
    parts = settings.tensor_parallel_size
    check_divides(config, parts)
    group, part = divmod(settings.rank, parts)
    experts = place_experts(config, settings.expert_parallel_size, settings.redundant_experts)
    if experts is None:
        if settings.expert_map:
            raise ConfigError("an expert map is for a model with experts", field="expert_map")
        return Shard(part, parts)
    try:
        experts = experts.changed(settings.expert_map)
    except InvalidRequest as error:
        raise ConfigError(error.message, field="expert_map") from error
    return Shard(part, parts, RankExperts(experts, group))


def _check_placement(settings: RankConfig) -> None:
    if settings.device not in DEVICES:
        raise ConfigError(
            f"device {settings.device} is not supported",
            field="device", found=settings.device, expected=" | ".join(DEVICES),
        )  # fmt: skip
    if settings.world_size % settings.expert_parallel_size:
        raise ConfigError(
            f"{settings.world_size} ranks are no {settings.expert_parallel_size} equal groups",
            field="ep",
        )
    if not 0 <= settings.rank < settings.world_size:
        raise ConfigError(f"there is no rank {settings.rank} of {settings.world_size}", field="tp")
