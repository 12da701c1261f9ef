"""Which source a target reads from: the choice itself, without anything that acts. Plain Python."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from relay_service.core.instance import Instance
from relay_service.core.seats import READERS_AT_FULL_SPEED


class Candidate(msgspec.Struct, frozen=True):
    """A source that fits, and what the target knows of it."""

    instance: Instance
    recut: bool = False
    """Whether its weights are cut anew on the way."""
    broke_off: bool = False
    """Whether it failed before, after it gave something."""
    near: bool = False
    """Whether it's on the target's host, so that reading it costs no link."""
    full: bool = False
    """Whether it just said that it feeds as many readers as it can."""


def choose(candidates: Sequence[Candidate], have_blocks: int) -> Candidate:
    """Returns the best source for a target that has `have_blocks` verified already.

    A copy comes before a cut; who never failed, before who did; this host, before any other.
    Of the others whoever can feed one more reader at full speed comes first: of these a complete
    holder, then an incomplete one that is ahead, the furthest first.
    """

    def rank(candidate: Candidate) -> tuple[object, ...]:
        source = candidate.instance
        incomplete = source.filling is not None
        crowded = source.leases >= READERS_AT_FULL_SPEED and not candidate.near
        behind = incomplete and source.have_blocks < have_blocks
        return (
            candidate.recut, candidate.broke_off, candidate.full, not candidate.near, behind,
            crowded, incomplete, source.leases, -source.have_blocks if incomplete else 0,
            source.instance,
        )  # fmt: skip

    return min(candidates, key=rank)


def has_seat(candidate: Candidate) -> bool:
    """Whether a source is complete and can feed one more reader at full speed."""
    source = candidate.instance
    return source.filling is None and (candidate.near or source.leases < READERS_AT_FULL_SPEED)


def nearest(line: Sequence[str], there: Collection[str]) -> str:
    """Names who closes the gap that a failed source has left; empty where nobody is there.

    `line` are those through whom blocks came, the nearest first. Where the next one takes the
    place of the one that failed, its seat is free, and whoever reads on need not know.
    """
    return next((name for name in line if name in there), "")


def reads_from(name: str, instances: Iterable[Instance]) -> set[str]:
    """Names everyone that reads from an instance, directly or through others.

    None of them can be its source. What is announced may be old: a source has the last word.
    """
    readers: dict[str, list[str]] = {}
    for instance in instances:
        if instance.filling:
            readers.setdefault(instance.filling.source, []).append(instance.instance)
    found: set[str] = set()
    todo = [name]
    while todo:
        new = set(readers.get(todo.pop(), ())) - found
        found |= new
        todo += new
    return found
