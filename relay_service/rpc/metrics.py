"""A relay's metrics, read from its objects whenever somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relay_service.core.holdings import Holdings
from relay_service.core.instance import Instance
from relay_service.core.transfers import Transfers
from relay_service.rpc.directory import DirectoryFleet


class RelayCollector(Collector):
    """Describes one relay."""

    def __init__(self, holdings: Holdings, transfers: Transfers, fleet: DirectoryFleet) -> None:
        self._holdings = holdings
        self._transfers = transfers
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it is now."""
        yield from self._moved()
        yield _gauge("leases", "Leases that are live.", self._holdings.leases.count())
        yield _gauge("transfers_running", "Transfers into instances of this host.",
                     len(self._transfers.running))  # fmt: skip
        kept = [one.arena_bytes for one in self._holdings.kept]
        yield _gauge("kept_arenas", "Instances that have ended whose arenas are kept.", len(kept))
        yield _gauge("kept_arena_bytes", "Memory of arenas that are kept.", sum(kept))
        attached = GaugeMetricFamily(
            "seedrelay_relay_instances", "Instances that are attached.", labels=["state"]
        )
        states = [record.state for record in self._holdings.records("")]
        for state in sorted(set(states)):
            attached.add_metric([state], states.count(state))
        yield attached
        known = GaugeMetricFamily(
            "seedrelay_relay_sources", "Instances known here, by what they can give.",
            labels=["state"],
        )  # fmt: skip
        gives = Counter(_gives(instance) for instance in self._fleet.known())
        for what in GIVES:
            known.add_metric([what], gives[what])
        yield known
        reachable = not self._fleet.directory or self._fleet.directory_reachable
        yield _gauge("directory_reachable", "1 if a directory hears us, or is ourselves.",
                     int(bool(reachable)))  # fmt: skip

    def _moved(self) -> Iterator[Metric]:
        tally = self._transfers.tally()
        moved = CounterMetricFamily(
            "seedrelay_relay_bytes", "Bytes of blocks that were moved.",
            labels=["direction", "transport"],
        )  # fmt: skip
        for transport, count in self._holdings.leases.bytes_served.items():
            moved.add_metric(["sent", transport], count)
        for transport, count in tally.bytes_received.items():
            moved.add_metric(["received", transport or "none"], count)
        yield moved
        blocks = CounterMetricFamily(
            "seedrelay_relay_blocks", "Blocks that landed, by whether they matched their digest.",
            labels=["result"],
        )  # fmt: skip
        blocks.add_metric(["verified"], tally.blocks_verified)
        blocks.add_metric(["failed"], tally.blocks_failed)
        yield blocks
        seconds = CounterMetricFamily(
            "seedrelay_relay_transfer_seconds", "Time that ended transfers took, by phase.",
            labels=["phase"],
        )  # fmt: skip
        seconds.add_metric(["matching"], tally.seconds_matching)
        seconds.add_metric(["transferring"], tally.seconds_transfer)
        yield seconds
        ended = CounterMetricFamily(
            "seedrelay_relay_transfers", "Transfers that have ended.", labels=["outcome"]
        )
        for outcome, count in sorted(tally.transfers.items()):
            ended.add_metric([outcome], count)
        yield ended


GIVES = ("complete", "incomplete", "nothing")


def _gives(instance: Instance) -> str:
    if instance.state.holds_weights and instance.weights.digest:
        return "complete"
    return "incomplete" if instance.filling and instance.state.fillable else "nothing"


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(f"seedrelay_relay_{name}", help_, value)
