"""Fills a target: matches sources, leases, reads, verifies, fails over.

Plain Python over ports. What landed stays; only what is missing is read again.
"""

from __future__ import annotations

import asyncio
import time

from relay_service.core.instance import Instance, Life, State
from relay_service.core.manifest import weights_digest
from relay_service.core.match import Match, Target, match, refuse_several_models, waiting_for
from relay_service.core.ports import Fleet, Transport
from relay_service.core.pull_report import PathStep, PullOptions, PullReport
from relay_service.core.rate import TokenBucket
from relay_service.core.reading import Reader
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.core.registry import EXPIRY_SECONDS
from relay_service.errors import (
    ConfigError,
    CorruptBlock,
    EpochChanged,
    FormatMismatch,
    LeaseEnded,
    NoSource,
    PartsMissing,
    PullTimeout,
    Refused,
    RelayError,
    ResourceExhausted,
    SourceFailed,
)

SEARCH_SECONDS = 0.25


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
    ) -> None:
        """Fills from the best source of a fleet, over the first transport that reaches it.

        `landed` is what an earlier pull into the same arenas left behind.
        """
        self.report = PullReport()
        self.receivers = receivers
        self._target = target
        self._fleet = fleet
        self._transports = _chosen(transports, options.transport)
        self._options = options
        limit = TokenBucket(options.rate_limit_bytes_per_second)
        self._reader = Reader(target, receivers, landed or Landed(), limit, self.report)
        self._left: set[Life] = set()
        self._broke_off: set[Life] = set()
        """Failed after they gave something: asked again when no other is there."""
        self._news_until = 0.0
        """When the fleet must have heard of an update that a source was left for."""
        self._began = time.monotonic()
        self._first_byte_at = 0.0
        self._last_error: Exception | None = None

    async def run(self) -> PullReport:
        """Pulls until every block is verified.

        Raises `FormatMismatch` when sources exist and none fits, `NoSource` when
        all that fitted were left, `CorruptBlock` when the last one was left for
        wrong bytes, `PullTimeout` at the deadline, `ResourceExhausted` where there is no memory.
        """
        try:
            async with asyncio.timeout(self._options.timeout_seconds or None):
                while not await self._drain(await self._next_source()):
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

    async def _next_source(self) -> Instance:
        """Waits for a source that fits and was not left. Raises when waiting is in vain."""
        while True:
            matches = match(self._target, await self._fleet.instances())
            # An update that comes to nothing leaves a source as it was: it may be asked again.
            self._left -= {m.instance.life for m in matches if m.instance.state is State.UPDATING}
            wanted = [m for m in matches if self._is_wanted(m.instance)]
            if not self.report.path:
                refuse_several_models([m.instance for m in wanted if m.fits])
            if candidates := [m for m in wanted if self._may_ask(m)]:
                return min(candidates, key=self._rank_of).instance
            if time.monotonic() > self._news_until:
                self._give_up_in_vain(wanted)
            self.report.note = waiting_for(wanted, self._options.source_instance)
            await asyncio.sleep(SEARCH_SECONDS)

    def _rank_of(self, match: Match) -> tuple[bool, bool]:
        """Ranks candidates: what can be copied first, then who did not break off yet."""
        return bool(match.recut), match.instance.life in self._broke_off

    def _may_ask(self, match: Match) -> bool:
        return match.fits and match.instance.life not in self._left

    def _is_wanted(self, instance: Instance) -> bool:
        return self._options.source_instance in ("", instance.instance, instance.model)

    def _give_up_in_vain(self, wanted: list[Match]) -> None:
        """Raises when waiting would not help: sources were left, or none of them fits."""
        if any(m.fits for m in wanted):
            raise self._exhausted()
        if self.report.path:
            raise NoSource(f"no source is left: {self.story()}", path=self.story())
        complete = [m for m in wanted if m.instance.state.holds_weights]
        if complete:
            first = complete[0]
            raise FormatMismatch(
                f"{first.instance.instance} does not fit: {first.reason}",
                field=first.reason.split(":", 1)[0], source=first.instance.instance,
                hint="start the target like the seed, or name another source",
            )  # fmt: skip

    def _exhausted(self) -> RelayError:
        last = self._last_error
        if isinstance(last, CorruptBlock | Refused | PartsMissing):
            last.details["path"] = self.story()
            return last
        return NoSource(f"no source is left: {self.story()}", path=self.story())

    async def _drain(self, source: Instance) -> bool:
        """Reads what is missing from one source; returns whether the target is complete."""
        step = PathStep(source.instance, source.address, moved_before=self.bytes_moved)
        self.report.path.append(step)
        before = self._reader.sum("bytes_landed")
        try:
            await self._read_from(source, step)
            step.reason = "complete"
        except (RelayError, OSError) as error:
            step.reason = self.report.note = str(error)
            if isinstance(error, ResourceExhausted):
                raise  # it is this host that has no memory: no other source would help
            self._leave(source, error, gave=self._reader.sum("bytes_landed") > before)
        finally:
            step.bytes_verified = self._reader.sum("bytes_landed") - before
        return step.reason == "complete"

    def _leave(self, source: Instance, error: Exception, *, gave: bool) -> None:
        self._last_error = error
        # A cut connection or an ended lease can be had anew.
        again = gave and isinstance(error, SourceFailed | LeaseEnded)
        (self._broke_off if again else self._left).add(source.life)
        if isinstance(error, EpochChanged):
            self._news_until = time.monotonic() + EXPIRY_SECONDS

    async def _read_from(self, source: Instance, step: PathStep) -> None:
        transport = await self._choose(source)
        step.transport = transport.name
        session = await transport.open(source, self._target.instance)
        try:
            way = await self._reader.prepare(session, source, step)
            if len(self.report.path) == 1:
                self.report.blocks_reused = sum(r.blocks_verified for r in self.receivers)
            self._enter_transfer()
            await self._reader.read(session, way)
            self.report.seconds_transfer = time.monotonic() - self._first_byte_at
            self._finish(source, step, await session.probe())
        finally:
            await session.close()

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
        steps = [f"{s.source_instance} ({s.transport or 'no transport'}): {s.reason or 'not done'}"
                 for s in self.report.path]  # fmt: skip
        said = steps or [self.report.note or "no source was found"]
        return "; ".join(filter(None, [*said, self._fleet.missing]))


def _chosen(transports: list[Transport], name: str) -> list[Transport]:
    chosen = [t for t in transports if name in ("", "auto", t.name)]
    if not chosen:
        raise ConfigError(
            f"unknown transport {name!r}",
            field="transport", expected=", ".join(t.name for t in transports), found=name,
        )  # fmt: skip
    return chosen
