"""A fleet in virtual time: links are a model, who reads from whom is decided as relays do.

Relays' own code decides: `choose`, `reads_from`, `nearest`, `continues` and `Seats`. Weights flow
as a fluid in ticks of a few blocks. In a tick a link carries so much out and so much in. A block is
passed on once it's whole: so a reader has at most what its source had a few blocks ago. Questions
are events between ticks: each one takes a relay a while, and so do a lease and a manifest.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection

from benchmarks.simulated_node import BLOCK_SECONDS, TICK_BLOCKS, TICK_SECONDS, Node
from relay_service.core.choice import Candidate, choose, nearest, reads_from
from relay_service.core.grants import MAX_PER_READ
from relay_service.core.instance import Instance
from relay_service.core.offer import continues
from relay_service.core.search import SEARCH_SECONDS, YIELD_SECONDS
from relay_service.core.seats import Seats

ANSWER_SECONDS = 0.001
"""For which a question keeps a relay busy."""
LEASE_SECONDS = 0.005
"""To have a lease, once the source knows through whom its own blocks come."""
HOP_SECONDS = MAX_PER_READ * BLOCK_SECONDS
"""Until a block is whole: there are as many on their way as connections, and they share a link."""
MANIFEST_SECONDS = 0.015
"""To send 300 KB, the manifest of 16 GiB, and to read and check it."""
ANNOUNCE_SECONDS, START_SECONDS = 1.0, 0.25
NOTICE_SECONDS = 0.1
"""Until a reader notices that its source has died."""
LINGER_SECONDS = 5.0
"""For which a dead reader still holds its lease."""


class Fleet:
    """A seed, and targets that begin at about the same time."""

    def __init__(
        self, targets: int, blocks: int, rng: random.Random,
        *, slow: float = 0.0, dies: float = 0.0, start_seconds: float = START_SECONDS,
        lease_seconds: float = LEASE_SECONDS, hop_seconds: float = HOP_SECONDS,
    ) -> None:  # fmt: skip
        """Of the targets some have links of half the speed, and some die while they are filled.

        A block is `hop_seconds` on its way from one to the next before that one can pass it on.
        """
        self._unfilled, self._lease_seconds = targets, lease_seconds
        self._lag_blocks = hop_seconds / BLOCK_SECONDS
        self.blocks, self.now, self.deepest = blocks, 0.0, 0
        self.turned = 0
        """How often a line turned out to be another one than was told."""
        self.seed = Node("seed", position=blocks, seats=Seats(self._clock), manifest_at=0.0)
        self.targets = [Node(f"t{n}", seats=Seats(self._clock)) for n in range(targets)]
        self.nodes = {node.name: node for node in [self.seed, *self.targets]}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._listed: list[Instance] = []
        for node in rng.sample(self.targets, round(slow * targets)):
            node.speed = 0.5
        for node in self.targets:
            node.began_at = rng.uniform(0, start_seconds)
            self._at(node.began_at, lambda now, node=node: self._search(node, now))
        for node in rng.sample(self.targets, round(dies * targets)):
            self._at(
                rng.uniform(0, blocks * BLOCK_SECONDS), lambda now, node=node: self._die(node, now)
            )
        self._at(0.0, self._announce)

    def _clock(self) -> float:
        return self.now

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self, limit_seconds: float) -> float:
        """Returns when the last target that lives is complete. Raises `RuntimeError` if never."""
        tick = 0
        while self._unfilled:
            tick += 1
            end = tick * TICK_SECONDS
            if end > limit_seconds:
                raise RuntimeError("some targets are never filled")
            while self._events and self._events[0][0] <= end:
                self.now, _, event = heapq.heappop(self._events)
                event(self.now)
            self.now = end
            self._flow(end)
        return max(node.done_at for node in self.targets)

    # What flows.

    def _flow(self, end: float) -> None:
        todo = [self.seed, *(n for n in self.targets if n.readers and n.source is None)]
        filled: list[Node] = []
        while todo:
            source = todo.pop()
            if source.manifest_at <= end:
                filled += self._give(source, end)
            todo += [reader for reader in source.readers if reader.readers]
        for node in filled:
            self._complete(node, end)

    def _give(self, source: Node, end: float) -> list[Node]:
        """Shares what a source can give in a tick among its readers; who takes less leaves it.

        Returns those that are complete now.
        """
        left = source.speed * TICK_BLOCKS
        complete = source.position >= self.blocks
        there = source.position - (0.0 if complete else self._lag_blocks)
        wanted = [(reader.takes(there, end), reader) for reader in source.readers]
        if len(wanted) > 1:
            wanted.sort(key=lambda one: one[0])
        for number, (most, reader) in enumerate(wanted):
            given = min(most, left / (len(wanted) - number))
            reader.position += given
            source.given += given
            left -= given
        return [reader for reader in source.readers if reader.position >= self.blocks]

    def _complete(self, node: Node, end: float) -> None:
        node.position, node.done_at, node.line = self.blocks, end, ()
        self._unfilled -= 1
        if source := node.source:
            source.readers.remove(node)
            source.leases.pop(node.name, None)
        node.source = None

    def _die(self, node: Node, now: float) -> None:
        if node.done_at:
            return
        node.gone = True
        self._unfilled -= 1
        if (source := node.source) and not source.gone:
            source.readers.remove(node)
            source.leases[node.name] = now + LINGER_SECONDS
        for reader in list(node.readers):
            self._at(now + NOTICE_SECONDS, lambda then, one=reader: self._lost(one, then))
        for waiting in node.waiting + node.pupils:
            self._at(now + NOTICE_SECONDS, waiting)
        node.readers, node.waiting, node.pupils = [], [], []

    # Who asks whom.

    def _announce(self, now: float) -> None:
        self._listed = [
            node.record(self.blocks, now)
            for node in self.nodes.values()
            if not node.gone and (node.source or node.position >= self.blocks)
        ]
        self._at(now + ANNOUNCE_SECONDS, self._announce)

    def _lost(self, node: Node, now: float) -> None:
        node.source = None
        self._close_gap(node, set(node.line[:1]), now)

    def _close_gap(self, node: Node, dead: set[str], now: float) -> None:
        if node.gone or node.done_at:
            return
        if name := nearest(node.line, self.nodes.keys() - dead):
            self._ask(node, self.nodes[name], now, yields=False, dead=dead)
        else:
            self._search(node, now)

    def _search(self, node: Node, now: float) -> None:
        """Asks whoever the directory says is best."""
        if node.gone:
            return
        below = reads_from(node.name, self._listed)
        candidates = [
            Candidate(one)
            for one in self._listed
            if one.instance not in below and one.instance != node.name
        ]
        source = self.nodes[choose(candidates, int(node.position)).instance.instance]
        node.yields_until = node.yields_until or now + YIELD_SECONDS
        self._ask(node, source, now, yields=now < node.yields_until)

    def _ask(
        self, node: Node, source: Node, now: float,
        *, yields: bool, manifest: Node | None = None, dead: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Asks for a lease; it is answered in turn, and once the source knows its own line."""
        source.busy_until = max(source.busy_until, now) + ANSWER_SECONDS

        def answer(then: float) -> None:
            if not (source.position >= self.blocks or source.line or source.gone):
                source.waiting.append(answer)
            elif not node.gone:
                self._answer(node, source, then, yields=yields, manifest=manifest, dead=dead)

        self._at(source.busy_until, answer)

    def _answer(
        self, node: Node, source: Node, now: float,
        *, yields: bool, manifest: Node | None, dead: Collection[str],
    ) -> None:  # fmt: skip
        if source.gone:
            found = {*dead, source.name}
            self._at(now + NOTICE_SECONDS, lambda then: self._close_gap(node, found, then))
        elif node.name in source.line:
            self._at(now + SEARCH_SECONDS, lambda then: self._search(node, then))
        elif yields and (ahead := source.seats.send_on(source.holders(now), node.name)):
            holder = self.nodes[source.seats.manifest_holder(node.name) or source.name]
            if not node.began:
                line = source.seats.line_of(ahead, source.holders(now))
                self._follow(node, (ahead, *line, source.name, *source.line), now)
            self._ask(node, self.nodes[ahead], now, yields=True, manifest=holder)
        else:
            self._grant(node, source, manifest or source, now)

    def _grant(self, node: Node, source: Node, manifest: Node, now: float) -> None:
        node.source, node.began, node.leased_at = source, True, now + self._lease_seconds
        source.readers.append(node)
        source.leases[node.name] = float("inf")
        self._follow(node, (source.name, *source.line), now)
        if node.manifest_at == float("inf"):
            self._learn(node, manifest, node.leased_at)

    def _follow(self, node: Node, line: tuple[str, ...], now: float) -> None:
        """Blocks come through others from now on: whoever waits to know hears so."""
        if node.line and not continues(line, node.line):
            self.turned += 1
            if node.readers:
                raise RuntimeError(f"{node.name}: its readers were told of another line")
        node.line = line
        self.deepest = max(self.deepest, len(line))
        waiting, node.waiting = node.waiting, []
        for ask in waiting:
            self._at(now, ask)

    def _learn(self, node: Node, holder: Node, now: float) -> None:
        """Gets the manifest from whoever has it, or from the source where that one has died."""
        if holder.gone:
            holder = node.source or self.seed
        if holder.manifest_at == float("inf"):
            holder.pupils.append(lambda then: self._learn(node, holder, then))
            return
        now = max(now, holder.manifest_at)
        node.manifest_at = max(now, node.leased_at) + MANIFEST_SECONDS
        pupils, node.pupils = node.pupils, []
        for learn in pupils:
            self._at(node.manifest_at, learn)
