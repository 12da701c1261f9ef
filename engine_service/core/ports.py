"""What the core needs of the rings around it. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)
from engine_service.core.step_messages import Row, Sampled
from relay_service.core.attachment import Attach
from relay_service.core.format import Format, Placement
from relay_service.core.instance import Instance
from relay_service.core.manifest import Manifest
from relay_service.core.pull_report import PathStep, PullOptions
from relay_service.core.reclaiming import HandedBack


class Runner(Protocol):
    """Runs one step on all ranks."""

    async def step(self, rows: tuple[Row, ...]) -> Sampled:
        """Returns what was sampled, one token per row. Raises `EngineError`."""


class Constraint(Protocol):
    """What one answer must look like, followed token by token."""

    def fresh(self) -> Constraint:
        """Returns the same for another answer."""

    def allowed(self) -> bytes:
        """Returns the tokens that may come next: bit `i % 8` of byte `i // 8` for token `i`."""

    def accept(self, token: int) -> bool:
        """Takes the token that came; returns whether the answer is complete and nothing follows.

        Raises `EngineError` for a token that may not come.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FillProgress:
    """How far a fill is."""

    phase: str
    source_instance: str = ""
    transport: str = ""
    bytes_verified: int = 0
    bytes_total: int = 0
    note: str = ""
    transfer: str = ""


@dataclass(slots=True, kw_only=True)
class FillReport:
    """What a fill did."""

    path: list[PathStep] = field(default_factory=list)
    transport: str = ""
    bytes_moved: int = 0
    bytes_reread: int = 0
    bytes_copied: int = 0
    blocks_reused: int = 0
    model: str = ""
    weight_version: str = ""
    weights_digest: str = ""
    source_weights_digest: str = ""
    seconds_matching: float = 0.0
    seconds_transfer: float = 0.0
    seconds_commit: float = 0.0
    seconds_probe: float = 0.0
    probe: bytes = b""


OnProgress = Callable[[FillProgress], None]


class KeptArena(Protocol):
    """The arenas of an instance's former life, which the relay of its host still holds."""

    arena_bytes: int
    """Of all ranks."""
    files: dict[str, bytes]
    """Small files of the model that it served, by name."""
    model: str

    async def take(
        self, format_: Format, placement: Placement, manifests: Sequence[Manifest]
    ) -> tuple[HandedBack, list[int]]:
        """Takes them, once, into arenas of this kind; the descriptors, by rank, are the caller's.

        Raises `WrongState` where they are of another kind or there no longer, `RelayUnreachable`.
        """

    async def let_go(self) -> None:
        """Has the memory given back. Raises what `take` does."""

    def close(self) -> None:
        """Leaves with the relay what was not taken."""


class RelayLink(Protocol):
    """The engine's connection to the relay of its host."""

    address: str

    async def offers(self) -> list[Instance]:
        """Lists every instance of the fleet. Raises `RelayUnreachable`."""

    async def manifests_of(self, instance: Instance) -> list[Manifest]:
        """Returns the verified manifests of an instance of the fleet, by rank.

        Raises `RelayUnreachable`, also when it does not hold what it announced any more.
        """

    async def fetch(self, instance: Instance, others: Sequence[Instance] = ()) -> dict[str, bytes]:
        """Fetches an instance's small files, each checked against its SHA-256.

        What it does not give, or gives wrong, is asked of `others` that announce the very same.
        Raises `RelayUnreachable`.
        """

    async def kept(self, instance: str, started_as: str) -> KeptArena | None:
        """Returns what was kept for an instance that is started as before; none if nothing was.

        Raises `RelayUnreachable` or `ConfigError`.
        """

    async def attach(
        self, describe: Callable[[], Attach], descriptors: Callable[[], list[int]]
    ) -> None:
        """Attaches, and attaches again by itself whenever the relay was away.

        Each time with the descriptors of then: arenas that were cut off lie in other memory.

        Raises `RelayUnreachable`, or `ConfigError` when the relay denies it.
        """

    async def update(self) -> None:
        """Tells the relay how the instance changed; a relay that is away hears it later."""

    async def closing(self, version: str, *, ends_leases: bool = False) -> Sequence[str]:
        """Says that other weights will serve soon; returns who holds a lease on the present ones.

        Nobody else gets one until `update`. With `ends_leases` those that are held end. Nobody
        is named where the relay is away.
        """

    async def pull(self, options: PullOptions, on_progress: OnProgress) -> FillReport:
        """Has the arenas filled. Raises `FillFailed` or `RelayUnreachable`."""

    async def stage(
        self, descriptors: list[list[int]], options: PullOptions, on_progress: OnProgress
    ) -> tuple[FillReport, list[Manifest]]:
        """Has new weights land in memory of each rank, beside those that serve.

        The memory is shaped like the arenas and stays the caller's, as do its descriptors. Only
        blocks that differ from what serves land there; the others are what serves, and so is
        what the manifests say of them. Of a source that is placed otherwise all blocks land.

        The relay gives the memory back before this returns. If it does not say so it is cut off,
        but may still write: whoever takes the weights over holds each block to its digest in
        memory that nobody else maps.

        Raises `FillFailed` or `RelayUnreachable`, or `ConfigError` when the relay denies the
        attachment by now; what serves is as it was.
        """

    async def source_files(self, report: FillReport) -> dict[str, bytes]:
        """Fetches the small files of the instance that weights came from.

        Raises `FillFailed` when it holds other weights by now, or `RelayUnreachable`.
        """

    async def return_mapping(self) -> bool:
        """Has the relay give up writing; returns whether it has, or is dead."""

    def detach(self) -> None:
        """Drops the connection; the link attaches again by itself, with what is true then."""

    async def manifests(self, ranks: int, *, staged: bool = False) -> list[Manifest]:
        """Returns what has landed in the arenas, or was staged, by rank.

        Raises `RelayUnreachable`.
        """

    async def close(self) -> None:
        """Detaches."""


OpenLink = Callable[[str], RelayLink]
"""Makes the link to the relay at an address."""


class ExpertRecovery(Protocol):
    """Brings lost experts back, and spreads experts over more or fewer groups of ranks.

    What has begun goes on when its caller leaves. Both raise `WrongState`, `InvalidRequest`,
    `UpdateBusy`, `RecoveryFailed` after which all is as before, or `RanksLost`.
    """

    progress: ExpertProgress | None
    """How far it is; none while nothing is done."""

    async def recover(self, options: RecoverOptions, on_progress: OnExpertProgress) -> ExpertReport:
        """Brings back what lost ranks held."""

    async def scale(self, groups: int, on_progress: OnExpertProgress) -> ExpertReport:
        """Spreads the experts over so many groups of ranks."""
