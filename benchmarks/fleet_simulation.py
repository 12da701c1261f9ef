"""How long until 1, 10, 100 and 1000 targets have 16 GiB, in virtual time.

Who reads from whom is decided by the relay's own code; see `simulated_fleet`. A target stands for
a host: what several instances of one host read of each other takes no link.

The lower bound is one copy over one link: nobody can be ready sooner. Beside fleets whose members
are alike, there are those of which some die, some have slow links, or that come one after another.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from benchmarks import simulated_fleet as model
from benchmarks import table
from benchmarks.line_chart import write_chart
from benchmarks.simulated_fleet import Fleet
from benchmarks.simulated_node import BLOCK_SECONDS, LINK_BYTES_PER_SECOND
from relay_service.core.manifest import BLOCK_BYTES

GOALS = {
    "simulated_1000_over_bound": "<= 1.3", "simulated_1000_seed_copies": "<= 1.5",
    "simulated_1000_over_bound_1_percent_die": "<= 1.5",
}  # fmt: skip
COLUMNS = {
    "over_bound": "time over bound", "median_over_bound": "median target",
    "slowest_over_bound": "slowest of its own", "seed_copies": "seed copies", "deepest": "deepest",
}  # fmt: skip
CASES = {
    "1 % die": {"dies": 0.01}, "10 % at half speed": {"slow": 0.1},
    "come within 30 s": {"start_seconds": 30.0}, "1 ms a lease": {"lease_seconds": 0.001},
    "9 ms a lease": {"lease_seconds": 0.009}, "one connection": {"hop_seconds": BLOCK_SECONDS},
    "1 ms more a hop": {"hop_seconds": model.HOP_SECONDS + 0.001},
}  # fmt: skip


def simulate(targets: int, blocks: int, seed: int, case: str = "") -> table.Row:
    """Runs one fleet. Its clock starts when the first target may ask."""
    bound = blocks * BLOCK_SECONDS
    settings = CASES.get(case, {})
    fleet = Fleet(targets, blocks, random.Random(seed), **settings)  # noqa: S311
    seconds = fleet.run(settings.get("start_seconds", 0.0) + 100 * bound)
    done = [node for node in fleet.targets if node.done_at]
    return {
        "method": f"{targets} targets" + (f", {case}" if case else ""), "round": seed,
        "targets": targets, "filled": len(done), "seconds": seconds, "over_bound": seconds / bound,
        "median_over_bound": statistics.median(node.done_at for node in done) / bound,
        "slowest_over_bound": max(node.done_at - node.began_at for node in done) / bound,
        "seed_copies": fleet.seed.given / blocks, "deepest": fleet.deepest,
    }  # fmt: skip


def main() -> None:
    """Simulates, prints the table, draws the chart, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB, 1 and 10 targets")
    parser.add_argument("--rounds", type=int, default=3, help="fleets that begin otherwise")
    options = parser.parse_args()
    counts, blocks = ((1, 10), 256) if options.quick else ((1, 10, 100, 1000), 16 << 10)
    rounds, last = 1 if options.quick else options.rounds, counts[-1]
    rows = [simulate(count, blocks, number) for number in range(rounds) for count in counts]
    rows += [simulate(last, blocks, number, "1 % die") for number in range(rounds)]
    rows += [simulate(last, blocks, 0, case) for case in list(CASES)[1:]]
    name = f"simulated_{last}"
    figures = {
        f"{name}_over_bound": table.median(rows, f"{last} targets", "over_bound"),
        f"{name}_seed_copies": table.median(rows, f"{last} targets", "seed_copies"),
        f"{name}_over_bound_1_percent_die": table.median(
            rows, f"{last} targets, 1 % die", "over_bound"
        ),
        f"{name}_over_bound_10_percent_slow": table.median(
            rows, f"{last} targets, 10 % at half speed", "median_over_bound"
        ),
    }
    settings = {
        "bytes": blocks * BLOCK_BYTES, "link_bytes_per_second": LINK_BYTES_PER_SECOND,
        "answer_seconds": model.ANSWER_SECONDS, "lease_seconds": model.LEASE_SECONDS,
        "manifest_seconds": model.MANIFEST_SECONDS, "notice_seconds": model.NOTICE_SECONDS,
        "announce_seconds": model.ANNOUNCE_SECONDS, "start_seconds": model.START_SECONDS,
        "hop_seconds": model.HOP_SECONDS, "rounds": rounds,
    }  # fmt: skip
    file = "fleet_simulation_quick" if options.quick else "fleet_simulation"
    table.write(file, settings, rows, COLUMNS, figures, GOALS)
    points = [(n, table.median(rows, f"{n} targets", "over_bound")) for n in counts]
    picture = table.OUTPUT if options.quick else Path(__file__).parent
    write_chart(picture / f"{file}.png", points)


if __name__ == "__main__":
    main()
