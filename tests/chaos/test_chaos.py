"""A handful of the seeds that `make chaos` plays, with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from relay_service.core.manifest import BLOCK_BYTES, HEADER_BYTES, weights_digest
from tests.chaos.plan import BLOCKS, DIRECTORY, Kind, make_plan
from tests.chaos.truth import Truth, contents, verified

SEEDS = (9, 17, 20, 21, 35, 41)
"""Every kind of event, fleets with one seed and with two, pairs on one host."""
LIMIT_SECONDS = 280.0
"""All waits of a run together, were they all to be in vain."""
LEFT_OUT = (21, 41)
"""Two targets wait one after the other for a source that lies; a relay hangs, as an engine does."""


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.full) if s in LEFT_OUT else s for s in SEEDS]
)
def test_chaos(seed: int) -> None:
    """Whatever happens, targets end right or say why, and nothing is left behind."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seed", str(seed)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_seeds_cover_everything() -> None:
    """What is played here has every kind of event, host and transport."""
    plans = [make_plan(seed) for seed in SEEDS]
    assert {event.kind for plan in plans for event in plan.events} == set(Kind)
    assert any(event.whom == DIRECTORY for plan in plans for event in plan.events)
    assert {len(plan.seeds) for plan in plans} == {1, 2}
    assert {engine.transport for plan in plans for engine in plan.targets} == {"", "tcp", "grpc"}
    assert any(len({t.relay for t in plan.targets}) < len(plan.targets) for plan in plans)


@pytest.mark.parametrize("seed", range(200))
def test_plans(seed: int) -> None:
    """A seed always makes the same plan, of events that can happen."""
    plan = make_plan(seed)
    assert plan == make_plan(seed)
    everyone = {DIRECTORY, *plan.relays, *(e.name for e in (*plan.seeds, *plan.targets))}
    for number, event in enumerate(plan.events):
        assert event.whom in everyone
        assert event.target in {engine.name for engine in plan.targets}
        assert event.follows < number
        if event.kind in (Kind.RESTART, Kind.RESUME):
            cause = plan.events[event.follows]
            assert (cause.whom, cause.percent <= event.percent) == (event.whom, True)
    assert not plan.harmed & set(plan.must_fill)


def test_wrong_bytes_are_seen(tmp_path: Path) -> None:
    """One bit that is not that of the version is noticed, and so is another version's digest."""
    plan = make_plan(1)
    truth, data = Truth(plan), bytearray(contents(plan, "v1"))
    digest = weights_digest([verified(bytes(data))])
    arena = tmp_path / "arena"
    arena.write_bytes(bytes(HEADER_BYTES) + data)
    assert truth.lie(arena, "v1", digest) == ""
    assert "is not the digest of 'v2'" in truth.lie(arena, "v2", digest)
    data[(BLOCKS - 1) * BLOCK_BYTES] ^= 1
    arena.write_bytes(bytes(HEADER_BYTES) + data)
    assert truth.lie(arena, "v1", digest) == f"blocks [{BLOCKS - 1}] are not those of v1"
