"""What a pull is asked to do, and what it did. Plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec


class PullOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to fill an instance."""

    source_instance: str = ""
    """Only instance, or only model, to pull from; empty for any that fits."""
    transport: str = ""
    """Only transport to use; empty to choose by probing."""
    rate_limit_bytes_per_second: int = 0
    timeout_seconds: float = 0.0
    """0 for none."""
    weights_digest: str = ""
    """Only weights to take, from whoever holds them; empty for whatever fits."""


@dataclass
class PathStep:
    """One source that was tried."""

    source_instance: str
    address: str
    transport: str = ""
    bytes_verified: int = 0
    reason: str = ""
    recut: str = ""
    """How it was placed otherwise, where its weights were cut anew; empty for a copy."""
    bytes_moved: int = 0
    """Bytes that it delivered, good or not."""


@dataclass
class PullReport:
    """What a pull did, and how far it is while it runs."""

    phase: str = "matching"
    note: str = ""
    path: list[PathStep] = field(default_factory=list)
    """In the order in which they were tried. In the end those that were read to the end come last,
    of these last who gave most."""
    model: str = ""
    weight_version: str = ""
    weights_digest: str = ""
    """Of the target; of other placement than the source it's another one than the source's."""
    source_weights_digest: str = ""
    blocks_reused: int = 0
    seconds_matching: float = 0.0
    seconds_transfer: float = 0.0
    probe: bytes = b""

    def story(self, missing: str = "") -> str:
        """Tells which sources were tried, over what, and why each was left.

        `missing` says whom nobody could ask.
        """
        steps = [f"{s.source_instance} ({s.transport or 'no transport'}): {s.reason or 'not done'}"
                 for s in self.path]  # fmt: skip
        said = steps or [self.note or "no source was found"]
        return "; ".join(filter(None, [*said, missing]))


def bytes_by_transport(path: list[PathStep]) -> Counter[str]:
    """Splits the bytes of a pull, so far, by the transport that they came over."""
    moved: Counter[str] = Counter()
    for step in path:
        moved[step.transport] += step.bytes_moved
    return moved
