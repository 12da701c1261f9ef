"""One instance of a fleet in virtual time, and how its relay announces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from relay_service.core.format import Format, Placement
from relay_service.core.instance import Filling, Instance, RankBlocks, State, Weights
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.seats import Seats

LINK_BYTES_PER_SECOND = 10e9 / 8
BLOCK_SECONDS = BLOCK_BYTES / LINK_BYTES_PER_SECOND
TICK_BLOCKS = 32
TICK_SECONDS = TICK_BLOCKS * BLOCK_SECONDS
DIGEST, FORMAT = "digest", Format(())


@dataclass(eq=False)
class Node:
    """One instance and its links."""

    name: str
    speed: float = 1.0
    """Of its links, as a part of a whole one."""
    position: float = 0.0
    """Blocks that it has: the first so many."""
    source: Node | None = None
    line: tuple[str, ...] = ()
    """Through whom they come, the nearest first; nobody once it has all."""
    readers: list[Node] = field(default_factory=list)
    leases: dict[str, float] = field(default_factory=dict)
    """Until when who holds one."""
    seats: Seats = field(default_factory=Seats)
    busy_until: float = 0.0
    leased_at: float = 0.0
    manifest_at: float = float("inf")
    began: bool = False
    """Whether it was granted a lease."""
    gone: bool = False
    began_at: float = 0.0
    done_at: float = 0.0
    given: float = 0.0
    yields_until: float = 0.0
    waiting: list[Callable[[float], None]] = field(default_factory=list)
    """Who waits for it to know through whom its blocks come."""
    pupils: list[Callable[[float], None]] = field(default_factory=list)
    """Who waits for it to have the manifest."""

    def record(self, blocks: int, now: float) -> Instance:
        """Describes it as its relay announces it."""
        complete = self.position >= blocks
        coming = Filling("m", "v", DIGEST, 1, self.source.name) if self.source else None
        return Instance(
            instance=self.name, generation="", model="m", format=FORMAT, placement=Placement(),
            state=State.READY if complete else State.LANDING, address=self.name,
            weights=Weights("v", DIGEST, 1), leases=len(self.holders(now)),
            ranks=(RankBlocks(0, int(self.position), blocks, 0),),
            filling=None if complete else coming,
        )  # fmt: skip

    def takes(self, there: float, end: float) -> float:
        """Returns how many blocks it can take in a tick, of those that are there."""
        blocks = self.speed * TICK_BLOCKS
        ready_at = max(self.leased_at, self.manifest_at)
        if (late := ready_at - (end - TICK_SECONDS)) > 0:
            blocks *= max(0.0, 1 - late / TICK_SECONDS)
        lag = there - self.position
        return 0.0 if lag <= 0 else min(lag, blocks)

    def holders(self, now: float) -> list[str]:
        """Names who holds a lease on it."""
        return [name for name, until in self.leases.items() if until > now]
