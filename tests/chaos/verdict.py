"""How a target may end: ready with the right weights, or failed with a reason, in time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from relay_service.config import DATA_CONNECTIONS
from relay_service.core.instance import State
from relay_service.core.lane import CORRUPTIONS_PER_SOURCE
from relay_service.core.manifest import BLOCK_BYTES
from tests.chaos.actors import DEADLINE_SECONDS
from tests.chaos.cast import Actor
from tests.chaos.plan import BLOCKS, Kind, Plan

OVERTIME_SECONDS = 15.0
"""What a target may take beyond its deadline: waits of its own, on a busy machine."""
_CORRUPT = "do not match their digest"


@dataclass(frozen=True)
class Verdict:
    """How one target ended."""

    plan: Plan
    target: Actor
    seconds: float
    """From when the targets started."""
    liars: Collection[str]

    def wrong(self) -> Iterator[str]:
        """Says what should not be."""
        name, said = self.target.name, self.target.said
        state = said.get("state")
        if not self.target.killed:
            if state == State.FAILED and not said["reason"]:
                yield f"{name} failed without a reason"
            if state != State.READY and name in self.plan.must_fill:
                yield f"{name} is {state} though nothing was in its way"
            limit = DEADLINE_SECONDS + OVERTIME_SECONDS
            if self.seconds > limit and not self.target.was_stopped:
                yield f"{name} took {self.seconds:.1f} s"
        for what in self._wrong_with_path():
            yield f"{name} {what}"

    def _wrong_with_path(self) -> Iterator[str]:
        """Says who is accused of wrong bytes and is no liar, and whether too much came again.

        What was in flight from a source that was lost may, and what a liar says until it is left.
        """
        path = self.target.said.get("path", ())
        lost = sum(reason != "complete" for *_, reason in path) * DATA_CONNECTIONS
        lies = sum(source in self.liars for source, *_ in path) * (CORRUPTIONS_PER_SOURCE + 1)
        accused = {source for source, _, reason in path if _CORRUPT in reason}
        for source in sorted(accused.difference(self.liars)):
            yield f"had wrong bytes of {source}"
        again = self.target.said.get("reread", 0)
        if not any(event.kind is Kind.UPDATE for event in self.plan.events):
            # Of one version nothing that was verified may be dropped and read once more.
            again = max(again, self.target.said.get("moved", 0) - BLOCKS * BLOCK_BYTES)
        if again > (lost + lies) * BLOCK_BYTES:
            yield f"read {again} bytes again; {lost + lies} blocks are excused"

    def __str__(self) -> str:
        name, said = self.target.name, self.target.said
        how = f"{name} {said.get('state', 'said nothing')} after {self.seconds:.1f} s"
        if self.target.killed:
            return f"{name} was killed when {said.get('state', 'starting')}"
        if "path" not in said:
            return f"{how}: {said.get('reason')}"
        path = "; ".join(f"{source} ({over}): {reason}" for source, over, reason in said["path"])
        moved = f"{said['moved'] >> 20} MiB moved, {said['reread'] >> 20} again"
        return f"{how} with {said['version']}, {moved}: {path}"
