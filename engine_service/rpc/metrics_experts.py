"""Metrics of who computes together, of losses and recoveries; see `metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from engine_service.core.instance import Instance
from engine_service.core.membership import Membership, MembershipState
from engine_service.core.recovery_tally import Change, RecoveryTally


def expert_metrics(instance: Instance) -> Iterator[Metric]:
    """Yields nothing of an instance whose ranks never change."""
    if instance.membership is None:
        return
    yield from _membership(instance.membership)
    yield from _recoveries(instance.recoveries)


def _membership(now: Membership) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "seedrelay_engine_membership_epoch", "Decisions on who computes together so far.", now.epoch
    )
    yield StateSetMetricFamily(
        "seedrelay_engine_membership_state", "1 for how whole the instance is.",
        {state.value: state is now.state for state in MembershipState},
    )  # fmt: skip
    yield GaugeMetricFamily(
        "seedrelay_engine_ranks_living", "Ranks that compute together.", len(now.members)
    )
    yield GaugeMetricFamily(
        "seedrelay_engine_experts_lost", "Experts that no rank holds, over all layers.",
        sum(map(len, now.lost.values())),
    )  # fmt: skip


def _recoveries(tally: RecoveryTally) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "seedrelay_engine_ranks_lost", "Ranks that were lost.", tally.ranks_lost
    )
    ended = CounterMetricFamily(
        "seedrelay_engine_recoveries", "Recoveries and scalings that have ended.",
        labels=["kind", "result"],
    )  # fmt: skip
    seconds = CounterMetricFamily(
        "seedrelay_engine_recovery_seconds", "Time that those took which were done.",
        labels=["kind"],
    )  # fmt: skip
    for kind in Change:
        ended.add_metric([kind, "done"], tally.done[kind])
        ended.add_metric([kind, "failed"], tally.failed[kind])
        seconds.add_metric([kind], tally.seconds[kind])
    yield ended
    yield seconds
    moved = CounterMetricFamily(
        "seedrelay_engine_recovery_bytes",
        "Bytes that ranks got: pulled from outside, or copied from ranks that lived.",
        labels=["way"],
    )
    moved.add_metric(["pulled"], tally.bytes_pulled)
    moved.add_metric(["copied"], tally.bytes_copied)
    yield moved
    yield CounterMetricFamily(
        "seedrelay_engine_recovery_paused_seconds",
        "Time in which no step could run because ranks or experts were changed.",
        tally.seconds_paused,
    )
