"""An engine's metrics, read from its objects whenever somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from engine_service.core.instance import Instance
from engine_service.core.request import Finish
from engine_service.rpc.metrics_experts import expert_metrics
from relay_service.core.instance import State


class EngineCollector(Collector):
    """Describes one instance."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it is now."""
        instance = self._instance
        now = instance.lifecycle.state
        yield StateSetMetricFamily(
            "seedrelay_engine_state", "1 for the state that the instance is in.",
            {state.value: state is now for state in State},
        )  # fmt: skip
        weights = instance.engine.weights
        yield InfoMetricFamily(
            "seedrelay_engine_weights", "Weights that serve; empty for a dummy.",
            {"version": weights.version, "digest": weights.digest,
             "model": instance.identity.model, "instance": instance.identity.name},
        )  # fmt: skip
        yield gauge("weights_epoch", "Commits so far.", weights.epoch)
        yield from self._requests()
        phases = GaugeMetricFamily(
            "seedrelay_engine_start_phase_seconds", "Time that each phase of the start took.",
            labels=["phase"],
        )  # fmt: skip
        seconds: dict[str, float] = {}
        for phase in instance.phases.measured:
            took = phase.end_seconds - phase.begin_seconds
            seconds[phase.name] = seconds.get(phase.name, 0.0) + took
        for name, took in seconds.items():
            phases.add_metric([name], took)
        yield phases
        yield from expert_metrics(instance)

    def _requests(self) -> Iterator[Metric]:
        scheduler = self._instance.engine.scheduler
        yield gauge("requests_running", "Requests that run.", len(scheduler.running))
        yield gauge("requests_waiting", "Requests that wait.", len(scheduler.waiting))
        yield gauge("kv_blocks_used", "KV blocks that are handed out.", scheduler.pool.used)
        yield gauge(
            "kv_blocks_cached", "KV blocks that the prefix cache can find.", scheduler.pool.cached
        )
        yield gauge("kv_blocks_total", "KV blocks in all.", scheduler.pool.total)
        yield CounterMetricFamily(
            "seedrelay_engine_generated_tokens", "Tokens that were generated.",
            scheduler.generated_tokens,
        )  # fmt: skip
        finished = CounterMetricFamily(
            "seedrelay_engine_requests", "Requests that have ended.", labels=["finish_reason"]
        )
        for reason in Finish:
            finished.add_metric([reason.value], scheduler.finished[reason])
        yield finished


def gauge(name: str, help_: str, value: float) -> Metric:
    """Returns a gauge of an engine."""
    return GaugeMetricFamily(f"seedrelay_engine_{name}", help_, value)
