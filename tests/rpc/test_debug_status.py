"""What an engine explains of itself while it is updated: `status --debug`, and metrics."""

import asyncio
import json
import re

import pytest
from engines import tokens
from fakes import eventually
from test_metrics import scraped
from typer.testing import CliRunner
from updates import TENSORS, Stand, pieces, wanted

from clients.cli import app
from engine_service.core.check_messages import FoundWeights
from engine_service.core.check_report import CheckMode, CheckReport, Difference
from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.core.update_sessions import Caller
from engine_service.errors import CheckpointError, UpdateBusy
from engine_service.rpc.metrics_updates import UpdateCollector
from relay_service.core.security import Security
from relay_service.rpc.metrics_server import MetricsServer
from seedrelay.v1 import engine_pb2

LABELS = ["gate", "lock", "update", "check", "versions", "memory"]
"""In the order in which one looks for trouble."""


@pytest.fixture
def stand(service, tmp_path):
    """An engine that serves old weights, behind a real gate."""
    pauser = service.instance.pauser
    stand = Stand(tmp_path, service)
    stand.instance.pauser = pauser
    stand.folder()
    service.servicer._updates = stand.updates
    return stand


@pytest.fixture
async def metrics(stand):
    """Address at which its updates are counted."""
    server = MetricsServer("127.0.0.1:0", Security())
    server.show(UpdateCollector(stand.instance, lambda: stand.updates))
    yield await server.start()
    await server.stop()


async def explained(stand) -> engine_pb2.DebugStatus:
    """Returns what the engine explains."""
    return (await stand.service.client.status(debug=True)).debug


async def shown(stand, *options: str) -> str:
    """Returns what the command prints."""
    line = ["status", stand.service.address, "--debug", *options]
    done = await asyncio.to_thread(CliRunner().invoke, app, line)
    assert done.exit_code == 0, done.output
    return done.stdout


def checked(stand, *differences: Difference) -> None:
    """Lets a check have ended, a thousandth of a second after the begin of 1970."""
    found = tuple(
        FoundWeights(manifest=one, tensors=(), address=0) for one in stand.instance.manifests
    )
    stand.instance.last_check = CheckReport(
        mode=CheckMode.DIGEST, ranks=found, differences=differences, against="a copy",
        weights=stand.instance.engine.weights, ended_at=0.001, seconds=0.5, seconds_paused=0.25,
    )  # fmt: skip


async def test_nothing_unless_asked(stand):
    """A status without a question costs nothing and says nothing of it."""
    assert not (await stand.service.client.status()).HasField("debug")
    debug = await explained(stand)
    assert not debug.HasField("pause")
    assert not debug.HasField("session")
    assert not debug.HasField("last_check")
    assert (list(debug.locks), [one.weight_version for one in debug.versions]) == ([], ["v1"])


async def test_an_update_that_waits(stand):
    """Who has the session, for how long still, who wants it next, and whom the commit waits for."""
    caller = Caller(operator="trainer", lease_seconds=40, wait_seconds=60)
    session = await stand.updates.begin(wanted(pause=PauseRequest(mode=PauseMode.WAIT)), caller)
    second = asyncio.ensure_future(stand.updates.begin(wanted(), caller))
    await eventually(lambda: stand.instance.turn.waiting)
    one = (await explained(stand)).session
    assert (one.session, one.operator, one.weight_version) == (session.name, "trainer", "v2")
    assert (one.source, one.phase, one.waiting) == ("disk:new", "waiting", 1)
    assert 30 < one.lease_seconds <= 40
    assert 0 <= one.age_seconds < 30
    await stand.updates.stage(session.name)
    stand.ranks.gate.clear()
    answer = asyncio.create_task(stand.service.answer(**tokens(1, 2, 3)))
    await stand.ranks.stepping.wait()
    commit = asyncio.ensure_future(session.commit())
    await eventually(lambda: stand.instance.engine.gate.closed_by)
    late = asyncio.create_task(stand.service.answer(**tokens(4)))
    await eventually(lambda: stand.instance.engine.gate.waiting)
    debug = await explained(stand)
    assert (debug.pause.operator, debug.pause.mode) == ("trainer", engine_pb2.PAUSE_MODE_WAIT)
    (lock,) = debug.locks
    assert (lock.side, lock.purpose, lock.waits) == ("writer", "update by trainer", False)
    assert (debug.session.phase, debug.session.lease_seconds) == ("pausing", 0)
    text = await shown(stand)
    assert "closed by trainer for" in text
    assert "update by trainer (writer) holds it for" in text
    assert "to v2 from disk:new, by trainer: pausing" in text
    assert "its lease does not run, 1 wait for its end" in text
    stand.ranks.gate.set()
    await asyncio.gather(answer, late, commit)
    assert await (await second).abort("enough")
    assert [(v.weight_version, v.result) for v in (await explained(stand)).versions] == [
        ("v1", "served"), ("v2", "serves"), ("v2", "aborted"),
    ]  # fmt: skip


async def test_who_waits_for_the_lock(stand):
    """Holders come before waiters, each with its age."""
    async with stand.instance.pauser.lock.writing("a commit"):
        late = asyncio.create_task(stand.service.answer(**tokens(4)))
        await eventually(lambda: len(stand.instance.pauser.lock.holders()) == 2)
        first, second = (await explained(stand)).locks
        assert (first.side, first.purpose, first.waits) == ("writer", "a commit", False)
        assert (second.side, second.purpose, second.waits) == (
            "reader", "admission of a request", True,
        )  # fmt: skip
        assert first.age_seconds >= second.age_seconds >= 0
    await late


async def test_the_last_check(stand):
    """What it found, and when."""
    checked(stand, Difference(rank=1, tensor="norm", what="contents"))
    debug = await explained(stand)
    assert (debug.last_check.equal, debug.last_check.differences[0].tensor) == (False, "norm")
    assert debug.last_check_time.ToMilliseconds() == 1
    assert "different from a copy (1 found): weights v1, epoch 1" in await shown(stand)
    checked(stand)
    assert "equal to a copy: weights v1" in await shown(stand)


async def test_the_order(stand):
    """The table, and the object of JSON, begin with what is looked at first."""
    text = await shown(stand)
    first = re.compile(r"^  (\w+) {2,}", re.MULTILINE)
    assert [label for label in first.findall(text) if label in LABELS] == LABELS[:-1]
    debug = json.loads(await shown(stand, "--json"))["debug"]
    assert list(debug) == ["pause", "locks", "session", "last_check", "versions", "memory"]
    assert (debug["pause"], debug["last_check"]) == (None, None)


async def test_metrics(stand, metrics):
    """Updates are counted by how they ended, with the time that their phases took."""
    before = await scraped(metrics)
    assert before["engine_updates_total", "committed"] == 0
    assert before["engine_paused_seconds_total",] == 0
    assert ("engine_last_check_equal",) not in before
    await stand.update(wanted())
    stand.ranks.bad = CheckpointError("no")
    with pytest.raises(CheckpointError):
        await stand.update(wanted(version="v3"))
    stand.ranks.bad = None
    session = await stand.updates.begin(wanted("push"), Caller())
    with pytest.raises(UpdateBusy):
        await stand.updates.begin(wanted(), Caller())
    await stand.updates.push(session.name, TENSORS, pieces())
    await session.abort("enough")
    checked(stand)
    after = await scraped(metrics)
    assert [after["engine_updates_total", r] for r in ("committed", "failed", "aborted")] == [1] * 3
    for phase in ("staging", "proving", "staged", "copying"):
        assert after["engine_update_seconds_total", phase, "committed"] > 0
    assert after["engine_update_seconds_total", "staging", "failed"] > 0
    assert after["engine_update_seconds_total", "proving", "failed"] == 0
    assert after["engine_update_seconds_total", "staged", "aborted"] > 0
    assert after["engine_update_seconds_total", "copying", "aborted"] == 0
    paused = after["engine_paused_seconds_total",]
    assert paused > 0
    assert (await scraped(metrics))["engine_paused_seconds_total",] == paused
    assert after["engine_last_check_equal",] == 1
    assert after["engine_last_check_timestamp_seconds",] == 0.001


async def test_metrics_of_a_pause(stand, metrics):
    """What is frozen, what waits at the gate, and what was sent back, as long as it is so."""
    stand.ranks.gate.clear()
    running = asyncio.create_task(stand.service.answer(**tokens(1, 2, 3)))
    await stand.ranks.stepping.wait()
    client = stand.service.client
    pausing = asyncio.create_task(client.pause(engine_pb2.PauseGenerationRequest()))
    await eventually(lambda: stand.instance.engine.gate.closed_by)
    stand.ranks.gate.set()
    await pausing
    late = asyncio.create_task(stand.service.answer(**tokens(4)))
    await eventually(lambda: stand.instance.engine.gate.waiting)
    held = await scraped(metrics)
    assert (held["engine_requests_paused",], held["engine_requests_at_gate",]) == (1, 1)
    retract = engine_pb2.PauseGenerationRequest(mode=engine_pb2.PAUSE_MODE_RETRACT)
    await client.pause(retract)
    sent_back = await scraped(metrics)
    assert sent_back["engine_requests_retracted_total",] == 1
    assert sent_back["engine_requests_paused",] == 0
    seconds = sent_back["engine_paused_seconds_total",]
    assert seconds > held["engine_paused_seconds_total",] > 0
    await client.resume()
    await asyncio.gather(running, late)
    gone = await scraped(metrics)
    assert (gone["engine_requests_paused",], gone["engine_requests_at_gate",]) == (0, 0)


async def test_a_relay_is_not_explained(fleet):
    """`--debug` of a relay is refused, with the reason."""
    relay = await fleet.relay()
    line = ["status", relay.address, "--debug"]
    done = await asyncio.to_thread(CliRunner().invoke, app, line)
    assert done.exit_code == 1
    assert "is a relay" in done.output
