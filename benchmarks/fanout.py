"""How long until 1, 2, 4 and 8 targets have all weights, and how many copies the seed gives away.

Every target is a relay process with a bare arena, and every relay gives away a capped number of
bytes per second: so a link is the bottleneck, as between hosts, and not this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from multiprocessing.connection import Connection

from benchmarks import table
from benchmarks.fanout_relays import be_host
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.rate import parse_rate

GOALS = {"eight_over_one": "<= 1.25", "seed_egress_copies_at_8": "<= 1.5"}
COLUMNS = {
    "seconds": "seconds",
    "seed_copies": "seed copies",
    "seconds_per_hop": "s per hop",
    "bytes_reread": "reread bytes",
}
COUNTS = (1, 2, 4, 8)
HEAD_START_SECONDS = 0.5
"""In which everyone attaches, before all begin at once."""


class Bench:
    """The seed's host and those of the targets."""

    def __init__(self, hosts: list[Connection], model_bytes: int) -> None:
        self._seed, *self._targets = hosts
        self._model_bytes = model_bytes
        self._pulls = 0

    def measure(self, method: str, count: int, number: int) -> table.Row:
        """Fills some targets at once: by themselves, or as a star, each from the seed."""
        self._pulls += 1
        targets, before = self._targets[:count], self._ask(self._seed, "egress")
        begin = time.monotonic() + HEAD_START_SECONDS
        for target in targets:
            target.send((self._pulls, begin, "seed" if method == "star" else ""))
        done = [target.recv() for target in targets]
        for target in targets:
            self._ask(target, "leave")
        if len({one["digest"] for one in done}) != 1 or not done[0]["digest"]:
            raise RuntimeError("the targets do not hold the same weights")
        given = self._ask(self._seed, "egress") - before
        return {
            "method": f"{method} {count}", "round": number, "targets": count,
            "seconds": max(one["ended"] for one in done) - begin,
            "seconds_each": [one["ended"] - begin for one in done],
            "sources": [one["source"] for one in done],
            "seed_copies": given / self._model_bytes,
            "seconds_per_hop": _per_hop([one["seconds_matching"] for one in done]),
            "bytes_reread": sum(one["bytes_reread"] for one in done),
        }  # fmt: skip

    def _ask(self, host: Connection, command: str) -> int:
        host.send(command)
        return host.recv() or 0


def _per_hop(seconds_matching: list[float]) -> float:
    """Returns by how much later each target of a chain has found its source, and knows what's due.

    Of a star it means nothing.
    """
    between = max(1, len(seconds_matching) - 1)
    return (max(seconds_matching) - min(seconds_matching)) / between


def compare(
    blocks: int, limit: int, counts: tuple[int, ...], rounds: int, stars: int
) -> list[table.Row]:
    """Measures every count in every round, stars in the first few only: they take long."""
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        _, seed, directory = start(table.peer(be_host, "seed", "", blocks, limit))
        hosts = [seed]
        for n in range(counts[-1]):
            _, pipe, _ = start(table.peer(be_host, f"target-{n}", directory, blocks, limit))
            hosts.append(pipe)
        bench, rows = Bench(hosts, blocks * BLOCK_BYTES), []
        bench.measure("chain", counts[-1], 0)  # connects, warms up, and does not count
        for number in range(rounds):
            methods = ["chain", "star"] if number < stars else ["chain"]
            rows += [bench.measure(m, count, number) for count in counts for m in methods]
            print(f"round {number + 1} of {rounds}")
    return rows


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 and 2 targets, 8 MiB, 1 round")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--stars", type=int, default=1, help="rounds with stars, 1 or more")
    parser.add_argument("--blocks", type=int, default=128, help="MiB of the model")
    parser.add_argument("--egress-limit", default="32MiB/s", help="of each relay")
    options = parser.parse_args()
    counts, blocks, rounds = COUNTS, options.blocks, options.rounds
    if options.quick:
        counts, blocks, rounds = COUNTS[:2], 8, 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = compare(blocks, parse_rate(options.egress_limit), counts, rounds, max(1, options.stars))
    last = counts[-1]
    figures = {
        "eight_over_one": table.median_ratio(rows, f"chain {last}", "chain 1", "seconds"),
        "star_eight_over_one": table.median_ratio(rows, f"star {last}", "star 1", "seconds"),
        "seed_egress_copies_at_8": table.median(rows, f"chain {last}", "seed_copies"),
    }
    if options.quick:  # of two, not of eight
        figures = {"two_over_one": figures["eight_over_one"]}
    settings = {
        "bytes": blocks * BLOCK_BYTES, "egress_limit": options.egress_limit, "transport": "tcp",
        "rounds": rounds, "star_rounds": options.stars,
        "seconds": "from the moment when all pulls begin to the last block verified",
        "versions": table.versions("grpcio", "xxhash"),
    }  # fmt: skip
    table.write("fanout_quick" if options.quick else "fanout", settings, rows, COLUMNS, figures,
                GOALS)  # fmt: skip


if __name__ == "__main__":
    main()
