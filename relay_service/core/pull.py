"""Fills a target: matches sources, leases, reads, verifies, fails over.

Plain Python over ports. What landed stays; only what is missing is read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from relay_service.core.instance import Instance
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.match import Target, placed_otherwise
from relay_service.core.offer import Offer
from relay_service.core.ports import Fleet, Transport
from relay_service.core.pull_report import PathStep, PullOptions, PullReport
from relay_service.core.rate import TokenBucket
from relay_service.core.reading import Copied, Reader
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.core.search import Search
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
    ) -> None:
        """Fills from the best source of a fleet, over the first transport that reaches it.

        `landed` is what an earlier pull into the same arenas left behind. `offer` is told what
        others may read while it lands; None for nothing.
        """
        self.report = PullReport()
        self.receivers = receivers
        self._target = target
        self._fleet = fleet
        self._transports = _chosen(transports, options.transport)
        self._options = options
        limit = TokenBucket(options.rate_limit_bytes_per_second)
        self._reader = Reader(target, receivers, landed or Landed(), limit, self.report)
        self._search = Search(target, fleet, options, self.report)
        self._offer = offer or (lambda _: None)
        self._landing: Offer | None = None
        self._began = time.monotonic()
        self._first_byte_at = 0.0

    async def run(self) -> PullReport:
        """Pulls until every block is verified.

        Raises `FormatMismatch` when sources exist and none fits, `NoSource` when
        all that fitted were left, `CorruptBlock` when the last one was left for
        wrong bytes, `PullTimeout` at the deadline, `ResourceExhausted` where there is no memory.
        """
        try:
            async with asyncio.timeout(self._options.timeout_seconds or None):
                while not await self._drain(*await self._search.next(self._blocks_verified)):
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
    def _blocks_verified(self) -> int:
        return sum(receiver.blocks_verified for receiver in self.receivers)

    async def _drain(self, source: Instance, yields: bool) -> bool:  # noqa: FBT001
        """Reads what is missing from one source; returns whether the target is complete."""
        step = PathStep(source.instance, source.address, moved_before=self.bytes_moved)
        self.report.path.append(step)
        before = self._reader.sum("bytes_landed")
        try:
            await self._read_from(source, step, yields=yields)
            step.reason = "complete"
        except (RelayError, OSError) as error:
            step.reason = self.report.note = str(error)
            if isinstance(error, ResourceExhausted):
                raise  # it is this host that has no memory: no other source would help
            if isinstance(error, SourceBusy):
                self.report.path.remove(step)  # it was not tried, only asked
            gave = self._reader.sum("bytes_landed") > before
            self._search.leave(source, error, gave=gave)
        finally:
            step.bytes_verified = self._reader.sum("bytes_landed") - before
        return step.reason == "complete"

    async def _read_from(self, source: Instance, step: PathStep, *, yields: bool) -> None:
        transport = await self._choose(source)
        step.transport = transport.name
        session = await transport.open(source, self._target.instance, yields=yields)
        try:
            self._search.reads_through(session.upstream)
            probe = await session.probe()
            # At once, though nobody knows the digests yet: whoever is next in line can begin.
            offer = Offer(source, self._manifests_of(source), probe, session.upstream)
            if copied := not placed_otherwise(self._target, source):
                self._offer(offer)
            way = await self._reader.prepare(session, source, step, self._search.manifest_holder)
            if isinstance(way, Copied):
                self._landing = Offer(source, way.manifests, probe, session.upstream)
                self._offer(self._landing)
            elif copied:
                self._offer(None)
            if len(self.report.path) == 1:
                self.report.blocks_reused = sum(r.blocks_verified for r in self.receivers)
            self._enter_transfer()
            await self._reader.read(session, way)
            self.report.seconds_transfer = time.monotonic() - self._first_byte_at
            self._finish(source, step, await session.probe())
        finally:
            await session.close()

    def _manifests_of(self, source: Instance) -> list[Manifest]:
        """Returns the manifests of a source's weights, if they land already."""
        landing = self._landing
        same = landing and landing.source.weights.digest == source.weights.digest
        return landing.manifests if landing and same else []

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

    def _finish(self, source: Instance, step: PathStep, probe: bytes) -> None:
        landed = weights_digest([receiver.manifest() for receiver in self.receivers])
        # Cut anew the weights have a digest of their own: each block was held to the source's.
        if not landed or (not step.recut and landed != source.weights.digest):
            raise SourceFailed(f"landed {landed}, {source.instance} has {source.weights.digest}")
        self.report.model = source.model
        self.report.weight_version = source.weights.version
        self.report.weights_digest = landed
        self.report.source_weights_digest = source.weights.digest
        self.report.probe = probe
        self.report.phase = "done"

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
