"""Metrics of pauses, updates and checks, read whenever somebody scrapes; see `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_service.core.instance import Instance
from engine_service.core.rank_memory import resident_bytes
from engine_service.core.update_request import Phase
from engine_service.core.update_sessions import UpdateSessions
from engine_service.core.version_history import Result
from engine_service.rpc.convert_debug import extra_bytes
from engine_service.rpc.metrics import gauge

RESULTS = {Result.SERVES: "committed", Result.FAILED: "failed", Result.ABORTED: "aborted"}


class UpdateCollector(Collector):
    """Describes how the weights of one instance change, and what that costs."""

    def __init__(self, instance: Instance, updates: Callable[[], UpdateSessions]) -> None:
        self._instance = instance
        self._updates = updates

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it is now."""
        yield from self._pauses()
        yield from self._ended()
        yield from self._memory()
        yield from self._check()

    def _pauses(self) -> Iterator[Metric]:
        engine = self._instance.engine
        frozen = len(engine.scheduler.running) if engine.frozen else 0
        yield gauge("requests_paused", "Requests that are frozen.", frozen)
        yield gauge("requests_at_gate", "Requests that wait at the gate.", engine.gate.waiting)
        yield CounterMetricFamily(
            "seedrelay_engine_paused_seconds", "Time for which the gate has been closed.",
            engine.gate.seconds_closed,
        )  # fmt: skip
        yield CounterMetricFamily(
            "seedrelay_engine_requests_retracted",
            "Answers sent back to the queue by a pause or an update.", engine.scheduler.retracted,
        )  # fmt: skip

    def _ended(self) -> Iterator[Metric]:
        tally = self._updates().tally
        ended = CounterMetricFamily(
            "seedrelay_engine_updates", "Updates that have ended.", labels=["result"]
        )
        seconds = CounterMetricFamily(
            "seedrelay_engine_update_seconds", "Time that ended updates took, by phase.",
            labels=["phase", "result"],
        )  # fmt: skip
        for result, name in RESULTS.items():
            ended.add_metric([name], tally.ended[result])
            for phase in Phase:
                if phase is not Phase.DONE:
                    seconds.add_metric([phase, name], tally.seconds[phase, result])
        yield ended
        yield seconds

    def _memory(self) -> Iterator[Metric]:
        workers = self._instance.ranks.workers
        resident = GaugeMetricFamily(
            "seedrelay_engine_rank_resident_bytes",
            "Memory of a rank's process, the arena included.", labels=["rank"],
        )  # fmt: skip
        staged = GaugeMetricFamily(
            "seedrelay_engine_rank_staged_bytes",
            "Memory of new weights beside those that serve, measured once they are whole.",
            labels=["rank"],
        )
        told = extra_bytes(self._updates().current, len(workers))
        for worker, extra in zip(workers, told, strict=False):
            resident.add_metric([str(worker.rank)], resident_bytes(worker.pid))
            staged.add_metric([str(worker.rank)], extra)
        yield resident
        yield staged

    def _check(self) -> Iterator[Metric]:
        check = self._instance.last_check
        equal = GaugeMetricFamily(
            "seedrelay_engine_last_check_equal", "1 if the last check found no difference."
        )
        ended = GaugeMetricFamily(
            "seedrelay_engine_last_check_timestamp_seconds", "When the last check ended."
        )
        if check:
            equal.add_metric([], int(check.equal))
            ended.add_metric([], check.ended_at)
        yield equal
        yield ended
