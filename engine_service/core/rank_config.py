"""What one rank worker is told at its start. Plain Python."""

from __future__ import annotations

import msgspec

from engine_service.core.expert_map import Slots


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank needs to know before it starts."""

    rank: int
    world_size: int
    generation: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    device: str
    threads: int
    kv_block_tokens: int
    kv_blocks: int
    weight_format: str = "auto"
    """How weight matrices are held: a format's name, or `auto`."""
    compiled: str = "off"
    """Whether a decode layer that was compiled ahead of time serves: `off`, `auto` where there
    is one, or `require` it."""
    collective_timeout_seconds: float = 30.0
    """Time in which all ranks must come to what they compute together."""
    expert_parallel_size: int = 1
    """Groups of ranks over which experts are spread; a divisor of `world_size`."""
    redundant_experts: int = 0
    """Slots of each layer beyond one for each expert."""
    expert_map: dict[int, Slots] = {}
    """Layers whose experts do not lie in a row."""

    outlives_peers: bool = False
    """Whether this rank goes on when another one is lost, and meets those that live."""
    joins_later: bool = False
    """Whether it is built alone: the others compute already, and meet it in a `Rejoin`."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks of each group."""
        return self.world_size // self.expert_parallel_size
