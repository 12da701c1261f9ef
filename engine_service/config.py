"""Settings of an engine service, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_service.core.expert_map import Slots
from engine_service.core.rank_config import RankConfig
from engine_service.errors import ConfigError
from relay_service import errors as relay_errors
from relay_service.core.reclaiming import MAX_KEEP_SECONDS
from relay_service.core.security import Security

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_FORMATS = ("auto", "plain", "packed", "int8", "fp8", "fp8-ue8m0", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine."""

    model: str
    """Folder with the model; a dummy's may lack weights, or be empty with a relay."""
    listen: str
    """Address to listen on, `HOST:PORT`; port 0 picks a free one."""
    load_format: str = "disk"
    """`disk` reads the checkpoint, `dummy` waits to be filled."""
    relay: str = ""
    """Address of the relay on this host; empty for none."""
    source: str = ""
    """Instance or model to be filled from; empty for any that fits."""
    weight_version: str = "v0"
    """What the operator calls the weights on disk."""
    instance_name: str = ""
    """Name in the fleet; empty for host and process id."""
    advertise: str = ""
    """Address under which others reach this engine; empty for the listening one."""
    tensor_parallel_size: int = 1
    """Tensor-parallel ranks."""
    collective_timeout_seconds: float = 30.0
    """Time in which all ranks must come to what they compute together."""
    expert_parallel_size: int = 1
    """Groups of tensor-parallel ranks over which experts are spread."""
    redundant_experts: int = 0
    """Replicas of experts in each layer, beyond one of each."""
    expert_map: Mapping[int, Slots] = field(default_factory=dict)
    """Layers whose experts shall not lie in a row."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own."""
    weight_format: str = "auto"
    """How matrices are held: one of `WEIGHT_FORMATS`; `auto` is the fastest that is exact."""
    compiled: str = "auto"
    """Decode with the layer that `seedrelay model compile` made: `auto` where there is one,
    `require`, or `off`."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    threads: int = 0
    """Compute threads per rank; 0 leaves one core to the front and the relay."""
    deadline_seconds: float = 300.0
    """Time in which a dummy with a relay must be filled."""
    lease_wait_seconds: float = 5.0
    """Longest wait of an update for those who read what it replaces; 0 for none."""
    fallback: str = "none"
    """`disk` loads from the folder when no source fills the dummy, `none` fails."""
    transport: str = ""
    """Only transport to fill through: `shm`, `tcp` or `grpc`; empty to choose by probing."""
    rate_limit_bytes_per_second: int = 0
    """Most bytes per second to fill with; 0 for no limit."""
    model_root: str = ""
    """Folder below which updates may read; empty for the one in which `model` lies."""
    model_key: str = ""
    """PEM file with an Ed25519 public key that must have signed what updates read; empty for
    none."""
    read_limit_bytes_per_second: int = 0
    """Most bytes per second that a rank reads of a checkpoint; 0 for no limit."""
    max_context_tokens: int = 8192
    """Most tokens of prompt and answer; the model's own limit if that is less."""
    kv_cache_tokens: int = 16384
    """Tokens that the KV cache holds for all requests together."""
    kv_block_tokens: int = 16
    """Tokens in one KV block."""
    max_running: int = 32
    """Most requests that run at once."""
    max_waiting: int = 256
    """Most requests that wait."""
    on_rank_death: str = "exit"
    """What follows when a rank of a ready instance dies: `exit`, or `restart` at the address."""
    on_rank_loss: str = "fail"
    """What follows when an expert-parallel instance that serves loses ranks: `fail`, `degrade` to
    those that live, or `recover` what was lost."""
    lost_experts: str = "hold"
    """Requests while experts are lost: `hold` them, or `route` them past those, and say so."""
    recovery_deadline_seconds: float = 120.0
    """Time in which lost experts must be back; an instance that holds requests fails then."""
    spare_ranks: int | None = None
    """Processes that stand ready to be ranks in the place of lost ones; by default as many as a
    group has ranks, where what was lost is recovered, else none."""
    prefill_chunk_tokens: int = 512
    """Most prompt tokens that one step computes, so that running answers go on meanwhile."""
    keep_arena_seconds: float = 0.0
    """How long the relay keeps the arena for the next life of this instance; 0 for not at all."""
    grace_seconds: float = 30.0
    """Time that running requests get at SIGTERM."""
    metrics_listen: str = ""
    """Address to serve metrics on, `HOST:PORT`; empty for none."""
    security: Security = field(default_factory=Security)
    """TLS and tokens; beyond loopback both, or the word that it may go without."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a setting that cannot work."""
        try:
            self.security.check_listen(self.listen)
            if self.metrics_listen:
                self.security.check_listen(self.metrics_listen)
        except relay_errors.ConfigError as error:
            raise ConfigError.of(error) from error
        _one_of("load_format", self.load_format, ("disk", "dummy"))
        _one_of("on_rank_death", self.on_rank_death, ("exit", "restart"))
        _one_of("on_rank_loss", self.on_rank_loss, ("fail", "degrade", "recover"))
        _one_of("lost_experts", self.lost_experts, ("hold", "route"))
        _one_of("fallback", self.fallback, ("disk", "none"))
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("weight_format", self.weight_format, WEIGHT_FORMATS)
        _one_of("transport", self.transport, ("", "auto", "shm", "tcp", "grpc"))
        _one_of("compiled", self.compiled, ("auto", "require", "off"))
        _one_of("device", self.device, ("cpu", "cuda"))
        self._check_keeping()
        self._check_losses()
        for name in ("redundant_experts", "lease_wait_seconds", "spare_ranks"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} is below 0", field=name)
        for name in (
            "tensor_parallel_size", "expert_parallel_size", "collective_timeout_seconds",
            "deadline_seconds", "recovery_deadline_seconds", "max_context_tokens",
            "kv_cache_tokens", "kv_block_tokens", "max_running", "max_waiting",
            "prefill_chunk_tokens",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0", field=name)

    def _check_keeping(self) -> None:
        seconds, field = self.keep_arena_seconds, "keep_arena_seconds"
        if not 0 <= seconds <= MAX_KEEP_SECONDS:
            limits = f"0 to {MAX_KEEP_SECONDS:g}"
            raise ConfigError(
                f"{field} is {seconds:g}", field=field, expected=limits, found=f"{seconds:g}"
            )
        # By default the name is another one at each start: nobody would take what was kept.
        if seconds and not (self.relay and self.instance_name and self.device == "cpu"):
            raise ConfigError(
                "an arena is kept by a relay, by the name of its instance, in memory of the host",
                field=field, hint="name --relay and --instance-name, with --device cpu",
            )  # fmt: skip

    def _check_losses(self) -> None:
        field = "on_rank_loss" if self.on_rank_loss != "fail" else "spare_ranks"
        if self.on_rank_loss == "fail" and not self.spares:
            return
        if self.expert_parallel_size < 2:
            raise ConfigError(
                "without a second group of ranks nobody outlives a loss", field=field,
                expected="expert_parallel_size above 1", found=str(self.expert_parallel_size),
                hint="name --ep above 1, or leave --on-rank-loss fail",
            )  # fmt: skip
        if self.device != "cpu":
            raise ConfigError(
                "a captured graph of a CUDA device keeps the ranks it was captured with",
                field=field, expected="device cpu", found=self.device,
                hint="use --device cpu, or leave --on-rank-loss fail",
            )  # fmt: skip

    @property
    def spares(self) -> int:
        """How many processes stand ready in the place of lost ranks."""
        if self.spare_ranks is not None:
            return self.spare_ranks
        return self.tensor_parallel_size if self.on_rank_loss == "recover" else 0

    @property
    def started_as(self) -> str:
        """What the operator asked for: who is started otherwise shall have other weights."""
        folder = str(Path(self.model).resolve())
        return repr((folder, self.weight_version, self.source))

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel_size * self.expert_parallel_size

    @property
    def threads_per_rank(self) -> int:
        """Compute threads of one rank."""
        spare = (os.cpu_count() or 2) - 1
        return self.threads or max(1, spare // self.ranks)

    @property
    def patience_seconds(self) -> float:
        """Time for what takes ranks no longer than a collective; who takes longer hangs."""
        return 1.5 * self.collective_timeout_seconds + 1.0

    @property
    def outlives(self) -> bool:
        """Whether ranks go on when others are lost."""
        return self.on_rank_loss != "fail" and self.expert_parallel_size > 1

    def of_rank(self, rank: int, generation: str, dtype: str) -> RankConfig:
        """Returns what one rank is told; `dtype` is the one it serves in, never `auto`."""
        return RankConfig(
            rank=rank, world_size=self.ranks, generation=generation, dtype=dtype,
            device=self.device, threads=self.threads_per_rank,
            kv_block_tokens=self.kv_block_tokens, kv_blocks=self.kv_blocks,
            weight_format=self.weight_format, compiled=self.compiled,
            collective_timeout_seconds=self.collective_timeout_seconds,
            expert_parallel_size=self.expert_parallel_size,
            redundant_experts=self.redundant_experts, expert_map=dict(self.expert_map),
            outlives_peers=self.outlives,
        )  # fmt: skip

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache."""
        return max(1, self.kv_cache_tokens // self.kv_block_tokens)

    @property
    def name(self) -> str:
        """Name in the fleet."""
        return self.instance_name or f"{os.uname().nodename}-{os.getpid()}"


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{field} {value!r} is unknown", field=field, expected=" | ".join(allowed), found=value
        )
