"""Experts are recovered and spread over real sockets; whoever asks sees how far it is."""

import dataclasses

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
    spread,
)
from fakes import eventually
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import scraped

from clients import report_membership
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


@pytest.mark.parametrize("state", MembershipState)
def test_every_state_has_a_name(state):
    """What is said of each is what the core calls it."""
    value = engine_pb2.MembershipState.Value(f"MEMBERSHIP_STATE_{state.name}")
    assert report_membership.state_name(value) == state.name
    assert report_membership.membership(engine_pb2.Membership()) is None


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
