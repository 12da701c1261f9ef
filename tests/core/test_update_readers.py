"""A commit that waits for those who read the weights that it replaces, in virtual time."""

import asyncio
import contextlib
import dataclasses

import pytest
from updates import Stand, contents_of, virtually, wanted

from engine_service.core.update_request import Phase, Staging
from engine_service.errors import RankDied, WaitTimeout
from relay_service.core.instance import State

PLACES = [("push", Staging.HOST), ("push", Staging.LAYERWISE), ("relay", Staging.HOST)]
ALL_THE_TIME = [["late"]] * 10_000


def update(tmp_path, reading, bound=3.0, source="push", prepare=lambda _: None, **changes):
    """Updates an instance that others read; returns the stand and the report, or the error."""

    async def work():
        stand = Stand(tmp_path)
        stand.instance.link.reading = list(reading)
        stand.instance.config = dataclasses.replace(stand.instance.config, lease_wait_seconds=bound)
        prepare(stand)
        try:
            return stand, await stand.update(wanted(source, **changes))
        except (RankDied, WaitTimeout) as error:
            return stand, error

    return virtually(work)


@pytest.mark.parametrize(("source", "staging"), PLACES)
def test_readers_that_finish(tmp_path, source, staging):
    """It waits until nobody reads any more, before the gate closes, and says for how many."""
    seen = []

    def prepare(stand):
        link, closing = stand.instance.link, stand.instance.link.closing

        async def look(*args, **more):
            progress = stand.instance.updating()
            seen.append((stand.instance.lifecycle.state, progress.phase, progress.note))
            return await closing(*args, **more)

        link.closing = look

    reading = [["a", "b"], ["a", "c"], ["c"]]
    stand, report = update(tmp_path, reading, source=source, prepare=prepare, staging=staging)
    assert (report.readers.readers, report.readers.leases_ended) == (3, 0)
    assert report.readers.seconds == pytest.approx(0.15)
    assert stand.instance.link.closed == [("v2", False)] * 4
    assert {state for state, _, _ in seen} == {State.READY}
    assert {phase for _, phase, _ in seen} == {Phase.READERS}
    assert "waiting for 2 readers: a, b" in {note for _, _, note in seen}
    assert report.seconds_paused < 1
    assert stand.instance.engine.weights.version == "v2"


@pytest.mark.parametrize(("source", "staging"), PLACES)
def test_a_reader_that_does_not_finish(tmp_path, source, staging):
    """It holds the update as long as the bound, and no longer; then its lease ends."""
    stand, report = update(tmp_path, ALL_THE_TIME, source=source, staging=staging)
    assert (report.readers.readers, report.readers.leases_ended) == (1, 1)
    assert report.readers.seconds == pytest.approx(3)
    assert stand.instance.link.closed[-2:] == [("v2", False), ("v2", True)]


@pytest.mark.parametrize(("bound", "asked"), [(0, None), (3, 0)])
def test_no_wait(tmp_path, bound, asked):
    """A bound of 0, set or asked for, asks nobody."""
    stand, report = update(tmp_path, ALL_THE_TIME, bound, lease_wait_seconds=asked)
    assert report.readers.readers == 0
    assert stand.instance.link.closed == []


def test_the_bound_of_one_update(tmp_path):
    """An update may ask for another bound than the engine was set to."""
    _, report = update(tmp_path, ALL_THE_TIME, bound=0, lease_wait_seconds=7)
    assert report.readers.seconds == pytest.approx(7)


def test_no_relay(tmp_path):
    """An instance without relay waits for nobody."""

    def prepare(stand):
        stand.instance.link = None

    _, report = update(tmp_path, [], prepare=prepare)
    assert report.readers.readers == 0


@pytest.mark.parametrize("after", [0, 2])
def test_a_relay_that_falls_silent(tmp_path, after):
    """It holds the update for the bound and a second for the last word, and fails nothing."""

    def prepare(stand):
        link, closing = stand.instance.link, stand.instance.link.closing

        async def silent(*args, **more):
            if len(link.closed) >= after:
                await asyncio.Event().wait()
            return await closing(*args, **more)

        link.closing = silent

    stand, report = update(tmp_path, ALL_THE_TIME, prepare=prepare)
    assert report.readers.leases_ended == 0
    assert report.readers.seconds == pytest.approx(4)
    assert stand.instance.engine.weights.version == "v2"


@pytest.mark.parametrize(("source", "staging"), PLACES)
def test_a_commit_that_fails_afterwards(tmp_path, source, staging):
    """What serves on can be read again: the relay is told."""

    def prepare(stand):
        @contextlib.asynccontextmanager
        async def applying(_):
            raise WaitTimeout("2 requests still run after 1 s")
            yield

        stand.instance.pauser.applying = applying

    stand, error = update(tmp_path, [["a"]], source=source, prepare=prepare, staging=staging)
    assert isinstance(error, WaitTimeout)
    assert stand.ranks.arenas_hold == contents_of(b"old")
    assert stand.instance.link.closed == [("v2", False)] * 2
    assert stand.instance.link.told == 1


@pytest.mark.parametrize(("source", "staging"), PLACES)
def test_the_phase_afterwards(tmp_path, source, staging):
    """An update that waits for its turn to apply does not claim to wait for readers."""
    phases = []

    def prepare(stand):
        applying = stand.instance.pauser.applying

        @contextlib.asynccontextmanager
        async def look(request):
            phases.append(stand.instance.updating().phase)
            async with applying(request) as report:
                yield report

        stand.instance.pauser.applying = look

    update(tmp_path, [["a"]], source=source, prepare=prepare, staging=staging)
    assert phases == [Phase.PAUSING]


def test_nobody_is_asked_before_all_is_staged(tmp_path):
    """Readers go on reading while new weights are staged and proven."""

    def prepare(stand):
        stand.steps.fail_at, stand.steps.error = 2, RankDied("rank 1 has died")

    stand, error = update(tmp_path, ALL_THE_TIME, prepare=prepare)
    assert isinstance(error, RankDied)
    assert stand.instance.link.closed == []
