"""Fills a target: matches sources, leases, reads, verifies, fails over.

Plain Python over ports. What landed stays; only what is missing is read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from relay_service.core.instance import Instance
from relay_service.core.lane import Lane, Work
from relay_service.core.lanes import Lanes
from relay_service.core.manifest import weights_digest
from relay_service.core.match import Target
from relay_service.core.offer import Offer
from relay_service.core.offering import Offering
from relay_service.core.pool import Pool
from relay_service.core.ports import Fleet, SourceSession, Transport
from relay_service.core.pull_report import PullOptions, PullReport
from relay_service.core.rate import Limits, TokenBucket
from relay_service.core.reading import Reader
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.core.search import Search
from relay_service.core.stock import take_stock
from relay_service.errors import (
    ConfigError,
    PullTimeout,
    RelayError,
    ResourceExhausted,
    SourceBusy,
    SourceFailed,
)


class Puller:
    """One pull into the arenas of one target."""

    def __init__(
        self,
        target: Target,
        receivers: list[Receiver],
        fleet: Fleet,
        transports: list[Transport],
        options: PullOptions,
        landed: Landed | None = None,
        offer: Callable[[Offer | None], None] | None = None,
        ingress: TokenBucket | None = None,
    ) -> None:
        """Fills from the best source of a fleet, over the first transport that reaches it.

        `landed` is what an earlier pull into the same arenas left behind. `offer` is told what
        others may read while it lands; None for nothing. `ingress` bounds it beside its own rate
        limit.
        """
        self.report = PullReport()
        self.receivers = receivers
        self._target = target
        self._fleet = fleet
        self._transports = _chosen(transports, options.transport)
        self._options = options
        own = TokenBucket(options.rate_limit_bytes_per_second)
        self._limit = Limits(own, ingress) if ingress else own
        self._reader = Reader(target, receivers, landed or Landed(), self.report)
        self._search = Search(target, fleet, options, self.report)
        self._offering = Offering(target, offer or (lambda _: None))
        self._began = time.monotonic()
        self._first_byte_at = 0.0

    async def run(self) -> PullReport:
        """Pulls until every block is verified, from several sources at once where that helps.

        Raises `FormatMismatch` when sources exist and none fits, `NoSource` when
        all that fitted were left, `CorruptBlock` when the last one was left for
        wrong bytes, `PullTimeout` at the deadline, `ResourceExhausted` where there is no memory.
        """
        try:
            async with asyncio.timeout(self._options.timeout_seconds or None):
                await take_stock(self.receivers)
                while not await self._fill(*await self._search.next(self.blocks_verified)):
                    pass
        except TimeoutError:
            raise PullTimeout(
                f"not filled within {self._options.timeout_seconds:g} s: {self.story()}",
                path=self.story(),
            ) from None
        return self.report

    @property
    def bytes_moved(self) -> int:
        """Bytes that came so far, good or not."""
        return self._reader.sum("bytes_moved")

    @property
    def bytes_reread(self) -> int:
        """Bytes that came and had to be read again."""
        return self._reader.bytes_reread

    @property
    def bytes_copied(self) -> int:
        """Bytes that were copied on this host, of blocks that are the same as others."""
        return sum(receiver.bytes_copied for receiver in self.receivers)

    @property
    def blocks_landed(self) -> int:
        """Blocks that came and matched their digest."""
        return self._reader.sum("blocks_landed")

    @property
    def blocks_failed(self) -> int:
        """Blocks that came and did not."""
        return self._reader.sum("blocks_failed")

    @property
    def bytes_verified(self) -> int:
        """Bytes that are right in the arenas, those of earlier pulls included."""
        return sum(receiver.bytes_verified for receiver in self.receivers)

    @property
    def blocks_verified(self) -> int:
        """Blocks that are right in the arenas, those of earlier pulls included."""
        return sum(receiver.blocks_verified for receiver in self.receivers)

    async def _fill(self, source: Instance, yields: bool) -> bool:  # noqa: FBT001
        """Reads what is missing from one source, and others beside it; returns whether it's all."""
        self._lanes = Lanes(
            self._search, self.report, self._drain, self._lead, lambda: self.blocks_verified
        )
        complete = await self._lanes.run(source, yields=yields)
        if complete:
            self._close_path()
            self.report.phase = "done"
        return complete

    async def _drain(self, lane: Lane) -> bool:
        """Reads what is missing from one source; returns whether the target is complete."""
        step, beside = lane.step, self._lanes.work is not None
        try:
            await self._read_from(lane)
            step.reason = "complete"
        except asyncio.CancelledError:
            if not lane.why:
                raise
            self._leave(lane, lane.why, beside=beside)
        except (RelayError, OSError) as error:
            self._leave(lane, error, beside=beside)
            if isinstance(error, ResourceExhausted):
                raise  # it is this host that has no memory: no other source would help
        return step.reason == "complete"

    def _leave(self, lane: Lane, error: Exception, *, beside: bool) -> None:
        step = lane.step
        step.reason = self.report.note = str(error)
        if isinstance(error, SourceBusy):
            self.report.path.remove(step)  # it was not tried, only asked
        self._search.leave(lane.source, error, gave=step.bytes_verified > 0, beside=beside)

    async def _read_from(self, lane: Lane) -> None:
        source, step, lanes = lane.source, lane.step, self._lanes
        if lanes.work is None and (busy := self._search.sent_on_by):
            self._offering.foresee(source, busy)
        transport = await self._choose(source)
        step.transport = transport.name
        session = await transport.open(source, self._target.instance, yields=lane.yields)
        try:
            lane.probe, lane.session = await session.probe(), session
            if lanes.work is None:
                self._search.line.leads(source, lane.upstream)
                self._offering.begin(lane)
                lanes.work = await self._plan(lane, session)
            lanes.opened(lane)
            await lane.read(lanes.work, session)
            self.report.seconds_transfer = time.monotonic() - self._first_byte_at
            self._finish(lane)
        finally:
            await session.close()

    async def _plan(self, lane: Lane, session: SourceSession) -> Work:
        """Finds the way from the first source, which those that are read beside it share."""
        way = await self._reader.prepare(
            session, lane.source, lane.step, self._search.manifest_holder
        )
        if len(self.report.path) == 1:
            self.report.blocks_reused = self.blocks_verified
        self._enter_transfer()
        pools = [Pool(partial(way.missing, rank), partial(way.unit, rank)) for rank in way.ranks]
        return Work(way, pools, self._limit, self.report)

    def _lead(self, lane: Lane, work: Work) -> None:
        """Takes note of which source the others stand beside: what lands comes through its line."""
        self._search.line.leads(lane.source, lane.upstream)
        self._offering.lead(lane, work.way)

    async def _choose(self, source: Instance) -> Transport:
        reasons = []
        for transport in self._transports:
            reason = await transport.unusable(source)
            if not reason:
                return transport
            reasons.append(f"{transport.name}: {reason}")
        raise SourceFailed(f"no transport to {source.instance}: {'; '.join(reasons)}")

    def _enter_transfer(self) -> None:
        self.report.phase = "transferring"
        if not self._first_byte_at:
            self._first_byte_at = time.monotonic()
            self.report.seconds_matching = self._first_byte_at - self._began

    def _finish(self, lane: Lane) -> None:
        if self.report.weights_digest and lane is not self._lanes.first:
            return  # said already; another one may call the same weights otherwise
        source = lane.source
        landed = weights_digest([receiver.manifest() for receiver in self.receivers])
        # Cut anew the weights have a digest of their own: each block was held to the source's.
        if not landed or (not lane.step.recut and landed != source.weights.digest):
            raise SourceFailed(f"landed {landed}, {source.instance} has {source.weights.digest}")
        self.report.model = source.model
        self.report.weight_version = source.weights.version
        self.report.weights_digest = landed
        self.report.source_weights_digest = source.weights.digest
        self.report.probe = lane.probe

    def _close_path(self) -> None:
        """Ends the path with those that were read to the end, the one that gave most last of all.

        Whoever was to help, and came too late to give anything, was not tried.
        """
        done = [step for step in self.report.path if step.reason == "complete"]
        done.sort(key=lambda step: step.bytes_verified)
        rest = [s for s in self.report.path if s.reason not in ("", "complete")]
        self.report.path[:] = [*rest, *(s for s in done[:-1] if s.bytes_moved), done[-1]]

    def story(self) -> str:
        """Tells which sources were tried, over what, and why each was left."""
        return self._search.story()


def _chosen(transports: list[Transport], name: str) -> list[Transport]:
    chosen = [t for t in transports if name in ("", "auto", t.name)]
    if not chosen:
        raise ConfigError(
            f"unknown transport {name!r}",
            field="transport", expected=", ".join(t.name for t in transports), found=name,
        )  # fmt: skip
    return chosen
