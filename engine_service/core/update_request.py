"""What an update of the weights is asked to do, and what it did. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine_service.core.load_report import Conversion
from engine_service.core.pause_modes import PauseReport, PauseRequest
from relay_service.core.pull_report import PathStep, PullOptions


class Staging(StrEnum):
    """Where weights wait for their commit."""

    HOST = "host"
    """Beside those that serve."""
    LAYERWISE = "layerwise"
    """In place, while nothing is served: what fails half-way leaves the instance failed.

    The pause begins with the staging and ends with the commit, at the pace of whoever
    pushes and commits.
    """


class Phase(StrEnum):
    """How far an update is, in this order."""

    WAITING = "waiting"
    STAGING = "staging"
    PROVING = "proving"
    STAGED = "staged"
    READERS = "readers"
    PAUSING = "pausing"
    COPYING = "copying"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSource:
    """A checkpoint folder on the host of the engine."""

    folder: str
    """Relative to the model root, or absolute."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of files, in hexadecimal, by name."""
    bytes_per_second: int = 0
    """Most that a rank reads; 0 for no limit."""

    def __str__(self) -> str:
        return f"disk:{self.folder}"


@dataclass(frozen=True, slots=True)
class PushSource:
    """Tensors that the caller sends."""

    def __str__(self) -> str:
        return "push"


@dataclass(frozen=True, slots=True)
class RelaySource:
    """Another instance, through the relay that the engine is attached to."""

    options: PullOptions

    def __str__(self) -> str:
        return f"relay:{self.options.source_instance}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What an update shall do."""

    version: str
    source: DiskSource | PushSource | RelaySource
    pause: PauseRequest
    base_digest: str = ""
    """Weights digest that must serve; empty for any."""
    expected_digest: str = ""
    """Weights digest that must be staged; empty for any."""
    partial: bool = False
    """Whether tensors that do not come stay as they are."""
    staging: Staging = Staging.HOST
    prompts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Prompts to run on the staged weights, and the tokens that must come; none for any."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that travel with the weights, by name."""
    narrow: bool = False
    """Whether tensors may lose bits in the type that the engine holds them in."""
    lease_wait_seconds: float | None = None
    """Longest wait for those who read what it replaces; none for what the engine was set to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProgress:
    """How far an update is."""

    phase: Phase
    bytes_done: int = 0
    bytes_total: int = 0
    note: str = ""
    session: str = ""


OnProgress = Callable[[UpdateProgress], None]


@dataclass(slots=True, kw_only=True)
class RankUpdate:
    """What is staged on one rank, and what became of it."""

    rank: int
    bytes_changed: int
    seconds_staged: float
    seconds_copied: float = 0.0
    extra_bytes: int = 0
    """Memory that staging has taken besides the weights that serve."""
    bytes_read: int = 0
    digest: str = ""
    conversions: tuple[Conversion, ...] = ()


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """What is staged: complete, checked and proven, on every rank."""

    ranks: list[RankUpdate]
    digest: str
    seconds: float
    notes: list[str]
    path: list[PathStep] = field(default_factory=list)

    @property
    def bytes_changed(self) -> int:
        """Bytes of all blocks that will change."""
        return sum(rank.bytes_changed for rank in self.ranks)


@dataclass(slots=True)
class ReadersWait:
    """How a commit waited for those who read the weights that it replaced."""

    readers: int = 0
    """Instances that read them then."""
    leases_ended: int = 0
    """Leases that were still held when the time was over."""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class UpdateReport:
    """What an update did."""

    version: str
    digest: str
    epoch: int
    staged: StagedWeights
    pause: PauseReport
    seconds_paused: float
    """From the closing of the gate until it was opened, or until the weights were applied."""
    cache_kept: bool
    readers: ReadersWait
