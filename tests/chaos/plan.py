"""What befalls a small fleet in one run: a pure function of a seed. Plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

BLOCKS = 32
"""MiB of the model."""
DIRECTORY = "directory"
MAX_TARGETS = 6
MAX_CAUSES = 4


class Kind(StrEnum):
    """What is done to somebody."""

    KILL = "kill"
    """SIGKILL."""
    RESTART = "restart"
    """A new process at the address of a killed relay."""
    STOP = "stop"
    """SIGSTOP: it hangs, and holds what it has."""
    RESUME = "resume"
    """SIGCONT: it wakes up late."""
    CUT = "cut"
    """Every TCP connection of a relay breaks; new ones may come."""
    FLIP = "flip"
    """A byte of a seed changes, and its manifest does not: it lies from now on."""
    UPDATE = "update"
    """A seed commits the second version in place, while it is read."""


@dataclass(frozen=True)
class Engine:
    """A seed or a target, and the relay of its host."""

    name: str
    relay: str
    transport: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happens when a target has so much, or has ended.

    What follows another event happens after it, and soon after it where no target gets on.
    """

    kind: Kind
    whom: str
    target: str
    percent: int
    follows: int = -1
    """Which event it follows, by its place in the plan; -1 for none."""

    def __str__(self) -> str:
        return f"{self.kind} {self.whom} at {self.percent} % of {self.target}"


@dataclass(frozen=True)
class Plan:
    """Who takes part and what happens, in order."""

    seed: int
    seeds: tuple[Engine, ...]
    targets: tuple[Engine, ...]
    events: tuple[Event, ...]
    changed: frozenset[int]
    """Blocks in which the second version differs from the first."""
    flipped: int
    """Block in which a liar lies."""

    @property
    def relays(self) -> list[str]:
        """Relays of all hosts, without the directory."""
        return list(dict.fromkeys(engine.relay for engine in (*self.seeds, *self.targets)))

    @property
    def harmed(self) -> frozenset[str]:
        """Who dies, hangs or lies at some time."""
        harm = (Kind.KILL, Kind.STOP, Kind.FLIP)
        return frozenset(event.whom for event in self.events if event.kind in harm)

    @property
    def must_fill(self) -> list[str]:
        """Targets for which nothing excuses a failure: they and a seed come to no harm."""
        if not any(self._spared(engine) for engine in self.seeds):
            return []
        return [engine.name for engine in self.targets if self._spared(engine)]

    def _spared(self, engine: Engine) -> bool:
        return not self.harmed & {engine.name, engine.relay}


def make_plan(seed: int) -> Plan:
    """Makes the plan of a seed; equal seeds make equal plans."""
    rng = random.Random(seed)  # noqa: S311 - nothing here is secret
    seeds = tuple(Engine(f"seed-{n}", f"relay-s{n}") for n in range(rng.choice((1, 2, 2))))
    targets = tuple(_targets(rng, rng.randint(1, MAX_TARGETS)))
    events: list[Event] = []
    for _ in range(rng.randint(1, MAX_CAUSES)):
        events += _cause(rng, seeds, targets, len(events))
    count = max(1, BLOCKS * rng.choice((1, 10, 50, 100)) // 100)
    changed = frozenset(rng.sample(range(BLOCKS), count))
    return Plan(
        seed, seeds, targets, tuple(events), changed, rng.randrange(BLOCKS * 3 // 4, BLOCKS)
    )


def _targets(rng: random.Random, count: int) -> Iterator[Engine]:
    """Gives each a relay of its own, or that of the one before: two read over shared memory."""
    shared = True
    relay = ""
    for number in range(count):
        shared = not shared and rng.random() < 0.4
        relay = relay if shared else f"relay-t{number}"
        transport = "" if shared else rng.choice(("", "tcp", "grpc"))
        yield Engine(f"target-{number}", relay, transport)


def _cause(
    rng: random.Random, seeds: tuple[Engine, ...], targets: tuple[Engine, ...], at: int
) -> Iterator[Event]:
    """Makes one event, and what follows it."""
    everyone = [*seeds, *targets]
    relays = list(dict.fromkeys(engine.relay for engine in everyone))
    kind = rng.choice((Kind.KILL, Kind.KILL, Kind.STOP, Kind.CUT, Kind.FLIP, Kind.UPDATE))
    if kind in (Kind.FLIP, Kind.UPDATE):
        whom = rng.choice(seeds).name
    elif kind is Kind.CUT:
        whom = rng.choice([DIRECTORY, *relays])
    else:
        whom = rng.choice([DIRECTORY, *relays, *(engine.name for engine in everyone)])
    target, percent = rng.choice(targets).name, rng.randrange(0, 101, 5)
    yield Event(kind, whom, target, percent)
    later = min(100, percent + rng.randrange(5, 40, 5))
    is_relay = whom in (DIRECTORY, *relays)
    comes_back = whom == DIRECTORY or rng.random() < 0.6
    if kind is Kind.KILL and is_relay and comes_back:
        yield Event(Kind.RESTART, whom, target, later, at)
    if kind is Kind.STOP and comes_back:
        yield Event(Kind.RESUME, whom, target, later, at)
