"""How long until 1, 10, 100 and 1000 targets have 16 GiB, in virtual time.

Who reads from whom is decided by the relay's own code: `choose`, `Seats` and `reads_from` are
what relays run. Everything else is a model. Time passes in steps of one block over one link.
In a step a node gives away one block in all, to its readers in turn, and takes in one; what it
took in is verified, and may be given away in the next step. The directory lists what was so
when it was announced last. Joining takes some steps: a lease, a manifest.

The lower bound is one copy over one link: nobody can be ready sooner.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import table
from benchmarks.line_chart import write_chart
from relay_service.core.choice import Candidate, choose, reads_from
from relay_service.core.format import Format, Placement
from relay_service.core.instance import Filling, Instance, RankBlocks, State, Weights
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.seats import Seats

GOALS = {"simulated_1000_over_bound": "<= 1.3", "simulated_1000_seed_copies": "<= 1.5"}
COLUMNS = {
    "over_bound": "time over bound", "seconds": "seconds", "seed_copies": "seed copies",
    "deepest": "deepest",
}  # fmt: skip
LINK_BYTES_PER_SECOND = 10e9 / 8
STEP_SECONDS = BLOCK_BYTES / LINK_BYTES_PER_SECOND
JOIN_SECONDS, ANNOUNCE_SECONDS = 0.005, 1.0
START_SECONDS = 0.25
DIGEST, FORMAT = "digest", Format(())


@dataclass
class Node:
    """One instance and its links."""

    name: str
    position: int = 0
    """Blocks that it has: the first so many."""
    source: Node | None = None
    readers: list[Node] = field(default_factory=list)
    seats: Seats = field(default_factory=Seats)
    joins_at: int = 0
    """Step of its next question."""
    sent_on: str = ""
    given: int = 0
    turn: int = 0

    def record(self, blocks: int) -> Instance:
        """Describes it as its relay announces it."""
        complete = self.position == blocks
        coming = Filling("m", "v", DIGEST, 1, self.source.name) if self.source else None
        return Instance(
            instance=self.name, generation="", model="m", format=FORMAT, placement=Placement(),
            state=State.READY if complete else State.LANDING, address=self.name,
            weights=Weights("v", DIGEST, 1), leases=len(self.readers),
            ranks=(RankBlocks(0, self.position, blocks, 0),),
            filling=None if complete else coming,
        )  # fmt: skip


class Fleet:
    """A seed and targets that begin at about the same time."""

    def __init__(self, targets: int, blocks: int, rng: random.Random) -> None:
        self.blocks = blocks
        self.step = 0
        self.seed = Node("seed", position=blocks, seats=self._seats())
        self.targets = [Node(f"t{n}", seats=self._seats()) for n in range(targets)]
        self.nodes = {node.name: node for node in [self.seed, *self.targets]}
        self._waiting = list(self.targets)
        for node in self.targets:
            node.joins_at = rng.randrange(round(START_SECONDS / STEP_SECONDS))
        self._listed: list[Instance] = []

    def _seats(self) -> Seats:
        return Seats(lambda: self.step * STEP_SECONDS)

    def run(self) -> int:
        """Returns the step in which the last target is complete."""
        announce = round(ANNOUNCE_SECONDS / STEP_SECONDS)
        busy = [self.seed]
        while any(node.position < self.blocks for node in self.targets):
            if self.step % announce == 0:
                self._listed = [n.record(self.blocks) for n in self.nodes.values() if n.position]
            for node in [n for n in self._waiting if n.joins_at <= self.step]:
                self._ask(node)
            busy = [node for node in self.nodes.values() if node.readers]
            moves = [move for node in busy if (move := self._give(node))]
            for giver, taker in moves:
                self._take(giver, taker)
            self.step += 1
        return self.step

    def _ask(self, node: Node) -> None:
        """Asks for a seat where it was sent, or at the best that the directory lists."""
        name, node.sent_on = node.sent_on, ""
        node.joins_at = self.step + max(1, round(JOIN_SECONDS / STEP_SECONDS))
        source = self.nodes[name or self._chosen(node)]
        if source is not self.seed and (source.source is None or source.joins_at > self.step):
            node.sent_on = name  # it doesn't know yet what it will hold: its answer takes a while
            node.joins_at = self.step + 1
            return
        if ahead := source.seats.send_on([r.name for r in source.readers], node.name):
            node.sent_on = ahead
            return
        node.source = source
        source.readers.append(node)
        self._waiting.remove(node)

    def _chosen(self, node: Node) -> str:
        below = reads_from(node.name, self._listed)
        candidates = [Candidate(i) for i in self._listed if i.instance not in below]
        return choose(candidates, node.position).instance.instance

    def _give(self, node: Node) -> tuple[Node, Node] | None:
        """Picks the reader whose turn it is, of those for whom something is there."""
        count = len(node.readers)
        for offset in range(count):
            reader = node.readers[(node.turn + offset) % count]
            if reader.position < node.position and reader.joins_at <= self.step:
                node.turn = (node.turn + offset + 1) % count
                return node, reader
        return None

    def _take(self, giver: Node, taker: Node) -> None:
        giver.given += 1
        taker.position += 1
        if taker.position == self.blocks:
            giver.readers.remove(taker)

    def depth(self, node: Node) -> int:
        """Returns how many blocks' journeys away from the seed a node is."""
        hops = 0
        while node.source:
            node, hops = node.source, hops + 1
        return hops


def simulate(targets: int, blocks: int, seed: int) -> table.Row:
    """Runs one fleet. Its clock starts when the first target may ask."""
    fleet = Fleet(targets, blocks, random.Random(seed))  # noqa: S311
    steps = fleet.run()
    return {
        "method": f"{targets} targets", "round": seed, "targets": targets,
        "seconds": steps * STEP_SECONDS, "over_bound": steps / blocks,
        "seed_copies": fleet.seed.given / blocks,
        "deepest": max(fleet.depth(node) for node in fleet.targets),
    }  # fmt: skip


def main() -> None:
    """Simulates, prints the table, draws the chart, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB, 1 and 10 targets")
    parser.add_argument("--rounds", type=int, default=3, help="fleets that begin otherwise")
    options = parser.parse_args()
    counts, blocks = ((1, 10), 256) if options.quick else ((1, 10, 100, 1000), 16 << 10)
    rounds = 1 if options.quick else options.rounds
    rows = [simulate(count, blocks, number) for number in range(rounds) for count in counts]
    last = f"{counts[-1]} targets"
    figures = {
        f"simulated_{counts[-1]}_over_bound": table.median(rows, last, "over_bound"),
        f"simulated_{counts[-1]}_seed_copies": table.median(rows, last, "seed_copies"),
    }
    settings = {
        "bytes": blocks * BLOCK_BYTES, "link_bytes_per_second": LINK_BYTES_PER_SECOND,
        "join_seconds": JOIN_SECONDS, "announce_seconds": ANNOUNCE_SECONDS, "rounds": rounds,
        "start_seconds": START_SECONDS,
    }  # fmt: skip
    name = "fleet_simulation_quick" if options.quick else "fleet_simulation"
    table.write(name, settings, rows, COLUMNS, figures, GOALS)
    points = [(n, table.median(rows, f"{n} targets", "over_bound")) for n in counts]
    picture = table.OUTPUT if options.quick else Path(__file__).parent
    write_chart(picture / f"{name}.png", points)


if __name__ == "__main__":
    main()
