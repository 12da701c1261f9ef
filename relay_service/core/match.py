"""Says which instances could fill a target, and why the others could not. Plain Python."""

from __future__ import annotations

import msgspec

from relay_service.core.format import Format, Placement
from relay_service.core.instance import Instance, State


class Target(msgspec.Struct, frozen=True):
    """What a target is: its name and what its bytes mean."""

    instance: str = ""
    format: Format | None = None
    """Without it, every complete holder fits."""
    placement: Placement | None = None


class Match(msgspec.Struct, frozen=True):
    """One instance and whether it could fill the target."""

    instance: Instance
    reason: str
    """Why it does not fit; empty if it fits."""

    @property
    def fits(self) -> bool:
        """Whether it could fill the target."""
        return not self.reason


def match(target: Target, instances: list[Instance]) -> list[Match]:
    """Judges every instance but the target: those that fit first, the least loaded first."""
    matches = [
        Match(instance, misfit(target, instance))
        for instance in instances
        if instance.instance != target.instance
    ]
    return sorted(matches, key=lambda m: (not m.fits, m.instance.leases, m.instance.instance))


def misfit(target: Target, source: Instance) -> str:
    """Says the first reason why `source` could not fill `target`; empty if it could."""
    if not source.state.holds_weights or not source.weights.digest:
        return f"state: {source.state} holds no complete weights"
    return difference(target, source)


def difference(target: Target, source: Instance) -> str:
    """Says the first difference of format or placement in words; empty if there is none."""
    if target.format is not None and (words := source.format.difference(target.format)):
        return words
    if target.placement is not None:
        return source.placement.difference(target.placement)
    return ""


def waiting_for(wanted: list[Match], source_instance: str) -> str:
    """Says what a pull waits for, of those instances that it may take."""
    if not wanted:
        return f"waiting for {source_instance or 'a source'}"
    states = ", ".join(f"{m.instance.instance} is {m.instance.state}" for m in wanted)
    loading = any(m.instance.state is not State.FAILED for m in wanted)
    return f"waiting for a source: {states}" if loading else f"no source: {states}"
