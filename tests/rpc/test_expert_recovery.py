"""Experts are recovered and spread over real sockets; whoever asks sees how far it is."""

import asyncio
import dataclasses
import json

import pytest
from experts import (
    EXPERTS,
    LAYERS,
    PARTS,
    REPORT,
    ROUTED,
    SPREAD,
    STEPS,
    WHOLE,
    FakeRecovery,
    spread,
)
from fakes import eventually
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import scraped
from typer.testing import CliRunner

from clients import report_membership
from clients.cli import app
from clients.errors import CallFailed, DeadlineExceeded
from engine_service.core.expert_map import ExpertMap
from engine_service.core.membership import MembershipState, RecoverOptions
from engine_service.core.recovery_tally import Change
from engine_service.errors import RanksLost, RecoveryFailed, WrongState
from engine_service.rpc.convert_experts import map_to_proto
from engine_service.rpc.metrics import EngineCollector
from relay_service.core.security import Security
from relay_service.rpc.metrics_server import MetricsServer
from seedrelay.v1 import engine_pb2

MEMBERSHIP_LINE = (
    "membership 2: ROUTED, 2 ranks in 1 group, 1 group lost, "
    "2 experts lost in 2 layers: rank 2 was killed"
)
LOST = ExpertMap(EXPERTS, dict.fromkeys(LAYERS, SPREAD[:1]))


@pytest.fixture
def lost(service):
    """A service that has lost a group, and with it expert 3 of both layers."""
    spread(service.instance, LOST)
    service.instance.membership = ROUTED
    service.instance.recovery = FakeRecovery(service.instance)
    return service


async def seedrelay(*line: str):
    """Runs a command beside the engine's event loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(line))


async def test_how_far_it_is_and_what_was_done(lost):
    """The options arrive; progress comes while it works, and a report at the end alone."""
    recovery = lost.instance.recovery
    recovery.may_end.clear()
    stream = lost.client.recover_experts(replace=True, source="seed", timeout=60)
    first = await anext(stream)
    recovery.may_end.set()
    *between, last = [message async for message in stream]
    assert recovery.asked == [RecoverOptions(replace=True, source="seed")]
    assert (first.progress.phase, first.HasField("report")) == ("planning", False)
    assert not any(message.HasField("report") for message in between)
    step = STEPS[-1]
    assert last.progress == engine_pb2.ExpertProgress(
        phase=step.phase, bytes_done=64, bytes_total=128, source="seed", note="slow"
    )
    done = last.report
    assert [(p.unit, p.part, p.bytes, p.source) for p in done.pulled] == [
        *map(tuple, REPORT.pulled)
    ]
    assert (done.bytes_pulled, done.bytes_copied, done.experts_moved) == (124, 512, 3)
    assert (done.ranks_started, done.seconds_started, done.seconds_pulled) == (2, 1.5, 0.25)
    assert (done.seconds_paused, done.seconds) == (0.125, 2.5)
    weights = lost.instance.engine.weights
    assert (done.epoch, done.weights_digest) == (weights.epoch, weights.digest)
    found = await lost.client.expert_map()
    assert (done.map, done.membership) == (found.map, found.membership)
    assert done.membership.state == engine_pb2.MEMBERSHIP_STATE_WHOLE


async def test_other_groups(lost):
    """The number arrives; less than one group is refused before anything is asked."""
    for groups in (0, -1):
        with pytest.raises(CallFailed, match="too few") as refused:
            [message async for message in lost.client.scale_experts(groups)]
        assert refused.value.code == "INVALID_ARGUMENT"
        assert refused.value.details["field"] == "expert_parallel_size"
    *_, last = [message async for message in lost.client.scale_experts(4)]
    assert (lost.instance.recovery.asked, last.report.bytes_copied) == ([4], 512)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecoveryFailed("nobody has layer.1.expert.3", unit="layer.1.expert.3"), "UNAVAILABLE"),
        (RanksLost("rank 1 has gone"), "UNAVAILABLE"),
        (WrongState("nothing is lost"), "FAILED_PRECONDITION"),
    ],
)
async def test_why_it_failed(lost, error, code):
    """The error is the one that stopped it, with its details."""
    lost.instance.recovery.error = error
    for stream in (lost.client.recover_experts(), lost.client.scale_experts(2)):
        with pytest.raises(CallFailed, match=error.message) as failed:
            [message async for message in stream]
        assert (failed.value.code, failed.value.reason) == (code, type(error).__name__)
        assert failed.value.details.items() >= error.details.items()


async def test_where_nothing_can_be_recovered(service):
    """A model without experts, and ranks that are not replaced, each say so."""
    for words in ("serves no experts", "cannot be replaced"):
        for stream in (service.client.recover_experts(), service.client.scale_experts(2)):
            with pytest.raises(CallFailed, match=words) as refused:
                [message async for message in stream]
            assert refused.value.code == "FAILED_PRECONDITION"
        spread(service.instance)


async def test_a_caller_that_leaves_ends_nothing(lost):
    """Others see how far it is, and it is done all the same."""
    recovery = lost.instance.recovery
    recovery.may_end.clear()
    with pytest.raises(DeadlineExceeded):
        [message async for message in lost.client.recover_experts(timeout=0.3)]
    membership = (await lost.client.status()).membership
    assert (membership.progress.phase, membership.progress.bytes_done) == ("pulling", 64)
    recovery.may_end.set()
    await eventually(lambda: lost.instance.membership.epoch == 3)
    assert not (await lost.client.status()).membership.HasField("progress")


async def test_who_computes_together(lost):
    """The status and the map say the same; watchers hear of a change."""
    watching = lost.client.watch()
    assert (await anext(watching)).membership.epoch == 2
    found = (await lost.client.expert_map()).membership
    assert found == (await lost.client.status()).membership
    assert (found.state, found.groups_lost) == (engine_pb2.MEMBERSHIP_STATE_ROUTED, 1)
    assert [(m.rank, m.group, m.pid) for m in found.members] == [*map(tuple, ROUTED.members)]
    assert {one.layer: tuple(one.experts) for one in found.lost} == ROUTED.lost
    assert (found.reason, found.on_rank_loss) == ("rank 2 was killed", "fail")
    lost.instance.membership = WHOLE
    assert (await anext(watching)).membership.state == engine_pb2.MEMBERSHIP_STATE_WHOLE
    await watching.aclose()
    lost.instance.membership = None
    assert not (await lost.client.status()).HasField("membership")


@given(st.sets(st.sampled_from([(layer, e) for layer in LAYERS for e in range(EXPERTS)])))
def test_digests_of_what_is_lost(gone):
    """Just those of lost experts are empty; all others are what they were."""
    from engines import Service

    instance = Service().instance
    spread(instance)
    before = {one.layer: one.digests for one in map_to_proto(instance).layers}
    held = {
        layer: tuple(tuple(e for e in group if (layer, e) not in gone) for group in SPREAD)
        for layer in LAYERS
    }
    spread(instance, ExpertMap(EXPERTS, held))
    for one in map_to_proto(instance).layers:
        assert list(one.digests) == [
            b"" if (one.layer, expert) in gone else digest
            for expert, digest in enumerate(before[one.layer])
        ]


async def test_the_table(lost):
    """Who lives stands above; a line for each group, and one for what nobody holds."""
    done = await seedrelay("experts", "show", lost.address)
    assert (done.exit_code, done.stdout.splitlines()) == (0, [
        MEMBERSHIP_LINE,
        "layer    ranks  experts (* also elsewhere)",
        "    1      0-1  0 1 2", "    1   nobody  3",
        "    2      0-1  0 1 2", "    2   nobody  3",
    ])  # fmt: skip
    lost.instance.recovery.progress = STEPS[-1]
    shown = json.loads((await seedrelay("experts", "show", lost.address, "--json")).stdout)
    assert shown["membership"] == {
        "epoch": 2, "state": "ROUTED", "groups_lost": 1, "lost": {"1": [3], "2": [3]},
        "members": [{"rank": m.rank, "group": m.group, "pid": m.pid} for m in ROUTED.members],
        "reason": "rank 2 was killed", "on_rank_loss": "fail",
        "progress": {"phase": "pulling", "bytes_done": 64, "bytes_total": 128, "source": "seed",
                     "note": "slow"},
    }  # fmt: skip
    assert (shown["layers"]["1"], shown["digests"]["1"][3]) == ([[0, 1, 2]], "")
    status = await seedrelay("status", lost.address)
    assert "  membership 2: ROUTED, 2 ranks in 1 group, 1 group lost" in status.stdout
    assert "  experts: pulling from seed: 64/128 bytes (slow)" in status.stdout
    status = json.loads((await seedrelay("status", lost.address, "--json")).stdout)
    assert status["membership"] == shown["membership"]


async def test_what_was_done_last(lost):
    """It can be seen later, and by others than who asked for it."""
    before = json.loads((await seedrelay("experts", "show", lost.address, "--json")).stdout)
    lost.instance.recoveries.ended(Change.RECOVER, REPORT)
    lost.instance.recoveries.ended(Change.SCALE, None)
    after = json.loads((await seedrelay("experts", "show", lost.address, "--json")).stdout)
    assert (before["last_report"], after["last_report"]["bytes_pulled"]) == (None, 124)
    assert [one["unit"] for one in after["last_report"]["pulled"]] == [
        u.unit for u in REPORT.pulled
    ]
    shown = (await seedrelay("experts", "show", lost.address)).stdout
    assert "\nlast change: 2 units and 124 bytes came from outside, 512 bytes" in shown


@pytest.mark.parametrize("state", MembershipState)
def test_every_state_has_a_name(state):
    """What is said of each is what the core calls it."""
    value = engine_pb2.MembershipState.Value(f"MEMBERSHIP_STATE_{state.name}")
    assert report_membership.state_name(value) == state.name
    assert report_membership.membership(engine_pb2.Membership()) is None


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (("recover",), RecoverOptions()),
        (("recover", "--replace", "--from", "disk"), RecoverOptions(replace=True, source="disk")),
        (("scale", "--ep", "3"), 3),
    ],
)
async def test_commands(lost, line, asked):
    """Words and JSON say what was done, and where the experts lie then; progress is on stderr."""
    command, *options = line
    done = await seedrelay("experts", command, lost.address, *options)
    assert done.exit_code == 0, done.output
    assert lost.instance.recovery.asked == [asked]
    assert "2 units and 124 bytes came from outside, 512 bytes from other ranks" in done.stdout
    assert "  layer.2.expert.3 part 1: 60 bytes from disk:/models/m" in done.stdout
    assert "membership 3: WHOLE, 4 ranks in 2 groups\nlayer" in done.stdout
    assert done.stdout.endswith("    2      2-3  3 0* 1*\n")
    assert "planning" in done.stderr
    done = await seedrelay("experts", command, lost.address, *options, "--json")
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["bytes_pulled"], shown["bytes_copied"]) == (0, 124, 512)
    assert shown["pulled"][0] == {
        "unit": "layer.1.expert.3", "part": 0, "bytes": 64, "source": "relay:seed",
    }  # fmt: skip
    assert shown["membership"]["epoch"] == 3
    assert shown["weights_digest"] == lost.instance.engine.weights.digest
    assert shown["layers"]["2"] == [*map(list, SPREAD)]


async def test_exit_codes(lost):
    """Refused is 1 with the reason, wrong usage 2, unreachable 3, too late 4."""
    recovery = lost.instance.recovery
    recovery.error = RecoveryFailed("nobody has it", hint="start an instance")
    for command in (("recover", lost.address), ("scale", lost.address, "--ep", "2")):
        refused = await seedrelay("experts", *command, "--json")
        error = json.loads(refused.stdout)["error"]
        assert (refused.exit_code, error["code"]) == (1, "UNAVAILABLE")
        assert "nobody has it" in refused.stderr
        assert "hint: start an instance" in refused.stderr
    assert (await seedrelay("experts", "scale", lost.address)).exit_code == 2
    assert (await seedrelay("experts", "scale", lost.address, "--ep", "0")).exit_code == 2
    assert (await seedrelay("experts", "recover", "127.0.0.1:1")).exit_code == 3
    recovery.may_end.clear()
    late = await seedrelay("experts", "recover", lost.address, "--deadline", "0.2")
    assert late.exit_code == 4
    recovery.error = None
    recovery.may_end.set()


async def test_what_is_counted(lost):
    """Who lives, what was lost, what recoveries came to; nothing where ranks never change."""
    server = MetricsServer("127.0.0.1:0", Security())
    server.show(EngineCollector(lost.instance))
    address = await server.start()
    tally = lost.instance.recoveries
    tally.ranks_lost += 2
    tally.ended(Change.RECOVER, REPORT)
    tally.ended(Change.RECOVER, dataclasses.replace(REPORT, pulled=()))
    tally.ended(Change.SCALE, None)
    found = await scraped(address)
    assert (found["engine_membership_epoch",], found["engine_membership_state", "routed"]) == (2, 1)
    assert sum(v for k, v in found.items() if k[0] == "engine_membership_state") == 1
    assert (found["engine_ranks_living",], found["engine_experts_lost",]) == (PARTS, 2)
    assert found["engine_ranks_lost_total",] == 2
    assert found["engine_recoveries_total", "recover", "done"] == 2
    assert found["engine_recoveries_total", "scale", "failed"] == 1
    assert found["engine_recoveries_total", "scale", "done"] == 0
    assert found["engine_recovery_bytes_total", "pulled"] == 124
    assert found["engine_recovery_bytes_total", "copied"] == 1024
    assert found["engine_recovery_seconds_total", "recover"] == 5
    assert found["engine_recovery_paused_seconds_total",] == 0.25
    lost.instance.membership = None
    assert not any("membership" in key[0] for key in await scraped(address))
    await server.stop()
