"""Fleets in virtual time, on the code with which relays decide who reads from whom."""

import random

import pytest

from benchmarks.simulated_fleet import ANSWER_SECONDS, HOP_SECONDS, START_SECONDS, Fleet
from benchmarks.simulated_node import BLOCK_SECONDS

BLOCKS = 4096
BOUND = BLOCKS * BLOCK_SECONDS
JOIN_SECONDS = 0.2
"""For questions, leases and manifests before the first block: they are not counted per hop."""


def fleet(targets: int, seed: int = 0, **changes) -> tuple[Fleet, float]:
    """Fills a fleet; returns it, and when the last target was complete."""
    simulated = Fleet(targets, BLOCKS, random.Random(seed), **changes)  # noqa: S311
    return simulated, simulated.run(20 * BOUND)


@pytest.mark.parametrize("targets", [1, 10, 100])
def test_a_chain_costs_a_block_a_hop(targets):
    """All read one line at full speed, and no lease or manifest holds up who comes after."""
    simulated, seconds = fleet(targets)
    hop_seconds = ANSWER_SECONDS + HOP_SECONDS
    assert seconds <= BOUND + START_SECONDS + JOIN_SECONDS + targets * hop_seconds
    assert seconds >= BOUND + (targets - 1) * HOP_SECONDS
    assert (simulated.deepest, simulated.turned) == (targets, 0)
    assert simulated.seed.given == pytest.approx(BLOCKS)
    assert all(len(node.readers) <= 1 for node in simulated.targets)


def test_what_a_block_waits_at_each_hop_adds_up():
    """However long a block takes from each one to the next, the last one has it so much later."""
    (_, without), (_, seconds) = fleet(100), fleet(100, hop_seconds=HOP_SECONDS + 0.01)
    assert seconds - without == pytest.approx(100 * 0.01, abs=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_the_last_that_live_are_filled(seed):
    """Where most die, many of them soon after whom they read from, the rest find one another."""
    simulated, _ = fleet(100, seed, dies=0.8)
    assert all(node.position == BLOCKS for node in simulated.targets if not node.gone)


@pytest.mark.parametrize("seed", range(3))
def test_those_that_live_are_filled(seed):
    """Where some die the gap is closed: the others come to no more than half of it in addition."""
    simulated, seconds = fleet(100, seed, dies=0.05)
    lived = [node for node in simulated.targets if not node.gone]
    assert len(lived) < 100
    assert all(node.position == BLOCKS for node in lived)
    assert seconds <= 1.5 * BOUND + START_SECONDS
    assert simulated.seed.given <= 1.5 * BLOCKS


def test_latecomers_wait_for_nobody():
    """Whoever comes while others are filled, or after, has the weights in the time of a copy."""
    simulated, _ = fleet(40, start_seconds=5 * BOUND)
    own = [node.done_at - node.began_at for node in simulated.targets]
    assert max(own) <= 1.2 * BOUND


def test_slow_links_hold_up_who_reads_through_them():
    """Nobody is slower than the slowest link, and the seed still gives one copy."""
    simulated, seconds = fleet(50, slow=0.1)
    assert 2 * BOUND <= seconds <= 2.3 * BOUND
    assert simulated.seed.given == pytest.approx(BLOCKS)
