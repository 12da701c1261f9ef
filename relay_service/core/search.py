"""Finds the next source of a pull, and remembers how the former ones did. Plain Python."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import msgspec

from relay_service.core.choice import Candidate, choose, has_seat, reads_from
from relay_service.core.instance import Instance, Life, State
from relay_service.core.line import Line, filled_like
from relay_service.core.match import (
    Match,
    Target,
    match,
    refuse_misfits,
    refuse_several_models,
    waiting_for,
)
from relay_service.core.ports import Fleet
from relay_service.core.pull_report import PullOptions, PullReport
from relay_service.core.registry import EXPIRY_SECONDS
from relay_service.errors import (
    CorruptBlock,
    EpochChanged,
    LeaseEnded,
    NoSource,
    NotYet,
    PartsMissing,
    Refused,
    RelayError,
    SourceBusy,
    SourceFailed,
)

SEARCH_SECONDS = 0.25
FULL_SECONDS = 1.0
"""How long a source that said that it is busy is not asked again."""
YIELD_SECONDS = 3.0
"""After that a target shares a busy source rather than wait for another one."""
STRIKES = 3
"""Times that an incomplete source may have nothing, before it's left for good."""


class Search:
    """Where one pull reads next."""

    def __init__(
        self, target: Target, fleet: Fleet, options: PullOptions, report: PullReport
    ) -> None:
        self._target = target
        self._fleet = fleet
        self._options = options
        self._report = report
        self._left: set[Life] = set()
        self._broke_off: set[Life] = set()
        """Failed after they gave something: asked again when no other is there."""
        self._strikes: Counter[Life] = Counter()
        self._full: dict[Life, float] = {}
        """Until when each source that said so counts as busy."""
        self._without_seat: dict[Life, float] = {}
        """The same of those that were to be read beside others, for whom nobody waits."""
        self._yields_until = 0.0
        self._sent_on: Instance | None = None
        """Whom a busy source named to read from instead."""
        self.manifest_holder: Instance | None = None
        """Whom it named to have the manifest from, sooner than from the source."""
        self.sent_on_by: SourceBusy | None = None
        """What it said of the line that whom it named is part of."""
        self.line = Line()
        self._changed: set[Life] = set()
        """Left since their weights were, or were about to be, others."""
        self._news_until = 0.0
        """When the fleet must have heard of an update that a source was left for."""
        self._last_error: Exception | None = None
        self._known: list[Instance] = []

    async def next(self, have_blocks: int) -> tuple[Instance, bool]:
        """Waits for a source that fits and was not left, for a target that has so many blocks.

        Returns it, and whether to yield to its readers. Raises when waiting is in vain.
        """
        while True:
            if ahead := self._take_sent_on():
                return ahead, True
            self.manifest_holder = self.sent_on_by = None
            if upstream := self.line.close_gap(self._known, self._may_be_asked):
                return upstream, False  # whom we read from had a seat there, and has failed
            await self.ask()
            wanted = [m for m in self._matches() if self._is_wanted(m.instance)]
            if not self._report.path:
                refuse_several_models([m.instance for m in wanted if m.fits])
            if candidates := self._candidates(wanted):
                best, yields = choose(candidates, have_blocks), self._yields
                if not (best.full and yields):
                    return best.instance, yields
            elif self._news_are_in() and not any(
                m.instance.state is State.UPDATING for m in wanted
            ):
                self._give_up_in_vain(wanted)
            self._report.note = waiting_for(wanted, self._options.source_instance)
            await asyncio.sleep(SEARCH_SECONDS)

    async def ask(self) -> None:
        """Asks the fleet who is there."""
        self._known = await self._fleet.instances()

    def beside(self, reading: list[Instance], have_blocks: int, *, any_: bool) -> Instance | None:
        """Chooses one more source of the weights that are being read, of those known last.

        It is complete and has a free seat, or with `any_` may be incomplete but is ahead. None
        where there is nobody like that.
        """
        lives, digest = {one.life for one in reading}, reading[0].weights.digest
        now = time.monotonic()
        wanted = [m for m in self._matches() if self._is_wanted(m.instance)]
        fitting = [
            one
            for one in self._candidates(wanted)
            if one.instance.weights.digest == digest
            and one.instance.life not in lives
            and not (one.recut or one.broke_off)
            and self._without_seat.get(one.instance.life, 0.0) <= now
            and (any_ or has_seat(one))
            and (one.instance.filling is None or one.instance.have_blocks > have_blocks)
        ]
        return choose(fitting, have_blocks).instance if fitting else None

    def leave(self, source: Instance, error: Exception, *, gave: bool, beside: bool) -> None:
        """Takes note of how a source failed, and whether it had given anything.

        Whoever was only to be read `beside` others is not followed to whom it sends on.
        """
        if isinstance(error, SourceBusy):
            if beside:
                self._without_seat[source.life] = time.monotonic() + FULL_SECONDS
            else:
                self._send_on(source, error)
            return
        self._last_error = error
        self.line.failed(source, error)
        self._strikes[source.life] += not gave
        # A cut connection or an ended lease can be had anew; what is to come may have come.
        again = gave and isinstance(error, SourceFailed | LeaseEnded | NotYet)
        patient = isinstance(error, NotYet) and self._strikes[source.life] < STRIKES
        (self._broke_off if again or patient else self._left).add(source.life)
        if isinstance(error, EpochChanged):
            self._news_until = time.monotonic() + EXPIRY_SECONDS
            if self._strikes[source.life] < STRIKES:
                self._changed.add(source.life)

    def _news_are_in(self) -> bool:
        """Whether the fleet has heard of all updates; what is announced still, came to nothing."""
        if time.monotonic() <= self._news_until:
            return False
        known = {one.life for one in self._known}
        again, self._changed = self._changed & known, set()
        self._left -= again
        return not again

    def _may_be_asked(self, instance: Instance) -> bool:
        return self._is_wanted(instance) and instance.life not in self._left

    def _matches(self) -> list[Match]:
        judged = match(self._target, self._known)
        # An update that comes to nothing leaves a source as it was: it may be asked again.
        self._left -= {m.instance.life for m in judged if m.instance.state is State.UPDATING}
        return [
            msgspec.structs.replace(m, instance=m.instance.as_source()) if m.fits else m
            for m in judged
        ]

    def _candidates(self, wanted: list[Match]) -> list[Candidate]:
        now, below = time.monotonic(), reads_from(self._target.instance, self._known)
        return [
            Candidate(
                m.instance,
                recut=bool(m.recut),
                broke_off=m.instance.life in self._broke_off,
                near=self._is_near(m.instance),
                full=self._full.get(m.instance.life, 0.0) > now,
            )
            for m in wanted
            if m.fits and m.instance.life not in self._left and m.instance.instance not in below
        ]

    def _is_near(self, source: Instance) -> bool:
        shared_memory = self._options.transport in ("", "auto", "shm")
        return shared_memory and source.address == self._fleet.address

    @property
    def _yields(self) -> bool:
        """Whether somebody else might come to read from, if a source is busy."""
        wanted = self._options.source_instance
        if wanted and any(one.instance == wanted for one in self._known):
            return False  # nobody else will do
        return not self._full or time.monotonic() <= self._yields_until

    def _may_pass_on(self, other: Instance) -> bool:
        """Whether another target gets what we want, block by block as we would."""
        return (
            other.state.fillable
            and other.instance != self._target.instance
            and other.format == self._target.format
            and other.placement == self._target.placement
        )

    def _send_on(self, busy: Instance, error: SourceBusy) -> None:
        now = time.monotonic()
        self._yields_until = self._yields_until or now + YIELD_SECONDS
        self._full[busy.life] = now + FULL_SECONDS
        known = {other.instance: other for other in self._known}
        if other := known.get(error.details.get("next", "")):
            if self._may_pass_on(other):
                self._sent_on, self.sent_on_by = filled_like(other, busy), error
                self.manifest_holder = known.get(error.details.get("manifest", ""))
            # One that serves takes just these weights too, and soon gives them.
            elif not (self._options.weights_digest and other.state.updatable):
                self._yields_until = now

    def _take_sent_on(self) -> Instance | None:
        ahead, self._sent_on = self._sent_on, None
        return ahead if ahead and self._strikes[ahead.life] < STRIKES else None

    def _is_wanted(self, instance: Instance) -> bool:
        named, digest = self._options.source_instance, self._options.weights_digest
        return named in ("", instance.instance, instance.model) and digest in (
            "", instance.weights.digest,
        )  # fmt: skip

    def _give_up_in_vain(self, wanted: list[Match]) -> None:
        """Raises when waiting would not help: sources were left, or none of them fits."""
        if any(m.fits for m in wanted):
            raise self._exhausted()
        if self._report.path:
            raise NoSource(f"no source is left: {self.story()}", path=self.story())
        refuse_misfits([m for m in wanted if m.instance.state.holds_weights])

    def _exhausted(self) -> RelayError:
        last = self._last_error
        if isinstance(last, CorruptBlock | Refused | PartsMissing):
            last.details["path"] = self.story()
            return last
        return NoSource(f"no source is left: {self.story()}", path=self.story())

    def story(self) -> str:
        """Tells which sources were tried, over what, and why each was left."""
        return self._report.story(self._fleet.missing)
