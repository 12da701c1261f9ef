"""Every step of an update, from every source: what happens when it fails, or its caller leaves.

The list of steps is what the fakes have seen an update do; nobody writes it down.
"""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from fakes import eventually
from updates import BRINGS, Stand, manifests_of, probe_of, wanted

from engine_service.core.update_request import Staging
from engine_service.core.update_sessions import Caller
from engine_service.core.version_history import Result
from engine_service.errors import CheckpointError, ProbeMismatch, RankDied, WrongState
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest

SOURCES = list(BRINGS)
PLACES = [*((source, Staging.HOST) for source in SOURCES),
          *((source, Staging.LAYERWISE) for source in ("disk", "push"))]  # fmt: skip


def prepared(root) -> Stand:
    """Returns an instance that can be updated from every source."""
    stand = Stand(root)
    stand.folder()
    stand.instance.link.files = {"generation_config.json": b'{"eos_token_id": 7}'}
    return stand


async def steps_of(root, source, staging) -> list[str]:
    """Returns what an update does that nothing hinders."""
    stand = prepared(root)
    await stand.update(wanted(source, staging=staging))
    return stand.steps.log


def assert_updated(stand: Stand, source: str, epoch: int = 2) -> None:
    """The new weights serve, and all that is said of them is theirs."""
    held, manifests = BRINGS[source](), manifests_of(BRINGS[source]())
    assert stand.ranks.arenas_hold == held
    assert stand.instance.manifests == manifests
    assert stand.instance.probe == probe_of(held)
    assert stand.instance.engine.weights == Weights("v2", weights_digest(manifests), epoch)
    last = stand.instance.history.records[-1]
    assert (last.result, last.version, last.epoch) == (Result.SERVES, "v2", epoch)
    assert stand.ranks.staged is None


@pytest.mark.parametrize(("source", "staging"), PLACES)
async def test_an_update(tmp_path, source, staging):
    """It reports what every rank did, tells the relay, and leaves the session to others."""
    stand = prepared(tmp_path)
    report = await stand.update(wanted(source, staging=staging))
    assert_updated(stand, source)
    assert stand.instance.lifecycle.state is State.READY
    assert [rank.bytes_changed for rank in report.staged.ranks] == [100, 101]
    assert [rank.seconds_copied for rank in report.staged.ranks] == [0.5, 0.5]
    assert report.staged.notes == ["tied: the head is the embedding"]
    assert report.seconds_paused >= report.pause.seconds == 0.25
    assert (report.version, report.epoch, report.cache_kept) == ("v2", 2, False)
    loads = [] if source == "relay" else [7, 7]
    assert [one.bytes_read for one in stand.instance.load_reports] == loads
    assert stand.instance.link.told == (2 if staging is Staging.LAYERWISE else 1)
    assert (7 in stand.instance.codec.end_ids) == (source == "relay")
    assert (stand.updates.current, stand.instance.turn.holder) == (None, "")


@pytest.mark.parametrize("error", [CheckpointError("it broke"), RankDied("rank 1 has died")])
@pytest.mark.parametrize("source", SOURCES)
async def test_a_step_that_fails(tmp_path, source, error):
    """Old weights exactly, and a session for whoever tries again; or `FAILED`, with the reason."""
    steps = await steps_of(tmp_path, source, Staging.HOST)
    assert steps[-1] == "ApplyUpdate"
    for number, name in enumerate(steps):
        stand = prepared(tmp_path)
        before = stand.facts()
        stand.steps.fail_at, stand.steps.error = number, error
        with pytest.raises(type(error), match=str(error)) as failed:
            await stand.update(wanted(source))
        last = stand.instance.history.records[-1]
        assert last.result is Result.FAILED, name
        assert str(error) in last.reason, name
        assert stand.instance.turn.holder == "", name
        if name == "ApplyUpdate":
            assert stand.instance.lifecycle.state is State.FAILED
            assert str(error) in stand.instance.lifecycle.reason
            assert failed.value.details["changed"] == "yes"
            continue
        assert stand.facts() == before, name
        assert stand.ranks.staged is None, name
        await stand.update(wanted(source))
        assert_updated(stand, source)


@pytest.mark.parametrize(("source", "staging"), PLACES[len(SOURCES) :])
async def test_a_step_that_fails_in_place(tmp_path, source, staging):
    """From the first byte on it is lost; before that, nothing has changed."""
    steps = await steps_of(tmp_path, source, staging)
    brings = "StageDisk" if source == "disk" else "StagePiece"
    first = steps.index(brings)
    for number, name in enumerate(steps):
        stand = prepared(tmp_path)
        before = stand.facts()
        stand.steps.fail_at, stand.steps.error = number, CheckpointError("it broke")
        with pytest.raises(CheckpointError, match="it broke") as failed:
            await stand.update(wanted(source, staging=staging))
        assert stand.instance.turn.holder == "", name
        if number <= first:  # it fails before it writes
            assert stand.facts() == before, name
        else:
            assert stand.instance.lifecycle.state is State.FAILED, name
            assert "half-way: it broke" in stand.instance.lifecycle.reason
            assert failed.value.details["changed"] == "yes"


@pytest.mark.parametrize("source", SOURCES)
async def test_a_caller_that_leaves(tmp_path, source):
    """Before the commit it ends the update; then it ends nothing."""
    steps = await steps_of(tmp_path, source, Staging.HOST)
    for number, name in enumerate(steps):
        stand = prepared(tmp_path)
        before = stand.facts()
        stand.steps.hold_at = number
        calling = asyncio.ensure_future(stand.update(wanted(source)))
        await stand.steps.reached.wait()
        calling.cancel()
        await asyncio.wait([calling])
        stand.steps.release.set()
        await eventually(lambda stand=stand: stand.updates.current is None)
        if name in ("pause", "ApplyUpdate"):
            assert_updated(stand, source)
            continue
        assert stand.facts() == before, name
        last = stand.instance.history.records[-1]
        assert (last.result, last.reason) == (Result.ABORTED, "its caller has left"), name
        assert stand.ranks.staged is None


async def test_a_caller_that_leaves_in_place(tmp_path):
    """Nobody knows what the arenas hold then, and nothing serves them."""
    stand = prepared(tmp_path)
    stand.steps.hold_at = "FinishStaging"
    calling = asyncio.ensure_future(stand.update(wanted(staging=Staging.LAYERWISE)))
    await stand.steps.reached.wait()
    assert stand.instance.lifecycle.state is State.UPDATING
    assert stand.instance.link.told == 1, "the relay offers what is being written over"
    calling.cancel()
    await asyncio.wait([calling])
    stand.steps.release.set()
    await eventually(lambda: stand.updates.current is None)
    assert stand.instance.lifecycle.state is State.FAILED
    assert "it was abandoned" in stand.instance.lifecycle.reason
    assert Result.SERVES not in [one.result for one in stand.instance.history.records]


async def test_one_rank_that_does_not_fit(tmp_path):
    """S13: what fails on one rank alone changes nothing on the others, nor does the next."""
    stand = prepared(tmp_path)
    before = stand.facts()
    stand.ranks.bad = CheckpointError("layer.1: shape (2, 3), expected (2, 4)")
    with pytest.raises(CheckpointError, match="shape"):
        await stand.update(wanted())
    assert stand.facts() == before
    stand.ranks.bad = None
    for epoch in range(2, 7):
        stand.folder(data=b"new" if epoch % 2 == 0 else b"other")
        await stand.update(wanted())
        assert stand.instance.engine.weights.epoch == epoch
    assert_updated(stand, "disk", epoch=6)


async def test_weights_that_are_others_by_now(tmp_path):
    """What was staged beside other weights, or for others, is not committed."""
    stand = prepared(tmp_path)
    session = await stand.updates.begin(wanted(), Caller())
    await stand.updates.stage(session.name)
    moved = Weights("v1", "ff" * 16, 2)
    stand.instance.engine.weights = moved
    with pytest.raises(WrongState, match="stage anew"):
        await session.commit()
    assert (stand.instance.engine.weights, stand.ranks.staged) == (moved, None)
    stand = prepared(tmp_path)
    stand.steps.hold_at = "pause"
    updating = asyncio.ensure_future(stand.update(wanted()))
    await stand.steps.reached.wait()
    stand.instance.engine.weights = moved  # while it waits for those that run
    stand.steps.release.set()
    with pytest.raises(WrongState, match="stage anew"):
        await updating
    assert "ApplyUpdate" not in stand.steps.log
    assert stand.instance.lifecycle.state is State.READY
    stand = prepared(tmp_path)
    for field in ("base_digest", "expected_digest"):
        with pytest.raises(WrongState, match=r"weights serve|was expected") as refused:
            await stand.update(wanted(**{field: "cd" * 16}))
        assert refused.value.details["field"] == field


async def test_a_probe_that_is_not_met(tmp_path):
    """What another instance computes with these weights must come out here, before the gate."""
    stand = prepared(tmp_path)
    before = stand.facts()
    stand.instance.link.probe = b"another"
    with pytest.raises(ProbeMismatch):
        await stand.update(wanted("relay"))
    assert stand.facts() == before
    assert "pause" not in stand.steps.log


@pytest.mark.parametrize("fails", [False, True])
async def test_memory_that_is_lent_is_let_go(tmp_path, fails):
    """Descriptors of the front's own are closed, however it ends."""
    stand = prepared(tmp_path)
    if fails:
        stand.steps.fail_at, stand.steps.error = 2, CheckpointError("no")
        with pytest.raises(CheckpointError):
            await stand.update(wanted("relay"))
        assert stand.steps.log[2] == "link.stage"
    else:
        await stand.update(wanted("relay"))
    assert [copies(fd) for fd in stand.ranks.lent] == [1, 1], "those of the ranks are left"


def copies(fd: int) -> int:
    """Counts the descriptors of this process that are of the same memory."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.path.sameopenfile(int(entry.name), fd)
    return found


async def test_an_instance_that_is_paused_stays_paused(tmp_path):
    """The pause is that of whoever closed the gate."""
    stand = prepared(tmp_path)
    stand.instance.lifecycle.to(State.PAUSED)
    report = await stand.update(wanted())
    assert report.pause.was_paused
    assert stand.instance.lifecycle.state is State.PAUSED
    assert_updated(stand, "disk")
