"""One update of the weights that serve: begin → stage → prove → commit | drop. Plain Python.

All that can be known before the gate closes is known by then: what is committed is staged on
every rank, whole, checked and proven, and was staged beside just those weights that serve.
So a commit is a copy, and whatever fails before it has changed nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from engine_service.core.instance import Instance
from engine_service.core.messages import Done
from engine_service.core.pause_modes import PauseMode, PauseReport
from engine_service.core.tokenizer import TextCodec
from engine_service.core.update_checks import check_serves, check_staged
from engine_service.core.update_files import joined, new_codec
from engine_service.core.update_messages import (
    Applied,
    ApplyUpdate,
    DropStaging,
    FinishStaging,
    OpenStaging,
    Proven,
    ProveStaged,
    UpdateStaged,
)
from engine_service.core.update_phases import PhaseClock
from engine_service.core.update_readers import closed_to_readers
from engine_service.core.update_request import (
    Phase,
    ReadersWait,
    RelaySource,
    StagedWeights,
    UpdateProgress,
    UpdateReport,
    WeightUpdate,
)
from engine_service.core.update_sources import Brought, UpdateSource, Watched, staged_weights
from engine_service.errors import EngineError, WrongState
from relay_service.core.instance import Weights
from relay_service.core.manifest import Manifest, weights_digest

SLOWEST_BYTES_PER_SECOND = 50e6
"""A rank that copies more slowly than that hangs."""
_log = logging.getLogger(__name__)


class Update:
    """What is beside the weights of one instance, and how it takes their place."""

    in_place = False
    """Whether it goes straight into the arenas instead."""

    def __init__(self, instance: Instance, wanted: WeightUpdate) -> None:
        """Raises `WrongState` unless just the weights serve that the update is meant for."""
        self.instance = instance
        self.wanted = wanted
        self.clock = PhaseClock()
        self.watched = Watched()
        self.staged: StagedWeights | None = None
        self.readers = ReadersWait()
        self._replies: list[UpdateStaged] = []
        self._probe = b""
        self._files: dict[str, bytes] = {}
        self._codec: TextCodec | None = None
        check_serves(instance, wanted)
        self._base = instance.engine.weights.digest, instance.engine.weights.epoch

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return self.clock.phase

    @property
    def base_digest(self) -> str:
        """Weights digest that it is meant for."""
        return self._base[0]

    def progress(self, session: str) -> UpdateProgress:
        """Returns how far it is; what the ranks say of bytes comes before what the source says."""
        watched = self.watched
        done, total = watched.bytes_done, watched.bytes_total
        if self.phase is Phase.STAGING and not total:
            each = self.instance.ranks.staging_progress
            done, total = sum(d for d, _ in each), sum(t for _, t in each)
        return UpdateProgress(
            phase=self.phase, bytes_done=done, bytes_total=total, note=watched.note, session=session
        )

    async def stage(self, source: UpdateSource) -> StagedWeights:
        """Stages the new weights on all ranks, and proves them.

        Raises `EngineError`; then nothing has changed, and what is staged is to be dropped.
        """
        began = time.monotonic()
        brought = await self._fill(source)
        await self._agree(brought)
        self.clock.enter(Phase.PROVING)
        self.watched.note = ""
        command = ProveStaged(probe=brought.probe, prompts=self.wanted.prompts)
        self._probe = (await self.instance.ranks.stage_same(command, Proven))[0].probe
        return self._is_staged(brought, time.monotonic() - began)

    async def commit(self) -> UpdateReport:
        """Makes what is staged serve.

        Raises `WrongState` when it was staged for other weights than those that serve now, or
        what `Pauser.applying` does: then nothing has changed. Else what fails here leaves the
        instance `FAILED`.
        """
        self._known()
        self._check_base()
        self.clock.enter(Phase.READERS)
        async with closed_to_readers(self.instance, self.wanted, self.watched) as self.readers:
            self.clock.enter(Phase.PAUSING)
            async with self.instance.pauser.applying(self.wanted.pause) as pause:
                entered = time.monotonic()
                self._check_base()  # while it waited, experts may have been moved
                weights = await self._apply()
        return await self._told(pause, weights, entered)

    async def drop(self) -> None:
        """Forgets what is staged, on every rank. A rank that has died is told elsewhere."""
        try:
            await self.instance.ranks.stage_same(DropStaging(), Done)
        except EngineError as error:
            _log.warning("what was staged cannot be dropped: %s", error)

    async def lost(self, error: EngineError) -> EngineError:
        """Gives the instance up, whose weights are neither the old nor the new ones."""
        reason = f"an update to {self.wanted.version} failed half-way: {error.message}"
        self.instance.history.end()
        await self.instance.fail(reason)
        return type(error)(reason, **{**error.details, "changed": "yes"})

    async def _fill(self, source: UpdateSource) -> Brought:
        self._check_base()
        self.clock.enter(Phase.STAGING)
        wanted = self.wanted
        await self.instance.ranks.stage(
            [
                OpenStaging(
                    serves=manifest,
                    partial=wanted.partial,
                    narrow=wanted.narrow,
                    in_place=self.in_place,
                )
                for manifest in self.instance.manifests
            ],
            Done,
        )
        return await source.stage(self.instance.ranks, self.watched)

    async def _agree(self, brought: Brought) -> None:
        """All ranks have everything, and it is what was meant."""
        instance, wanted = self.instance, self.wanted
        self._replies = await instance.ranks.stage_same(FinishStaging(), UpdateStaged)
        check_staged(wanted, instance.manifests, self._manifests)
        if instance.codec is None:
            raise WrongState("the instance has no tokenizer", field="state")
        self._files = joined(instance.files, {**brought.files, **wanted.files})
        self._codec = instance.codec
        if self._files != instance.files:
            self._codec = await asyncio.to_thread(
                new_codec, instance.codec, instance.files, self._files
            )

    @property
    def _manifests(self) -> list[Manifest]:
        return [reply.manifest for reply in self._replies]

    def _is_staged(self, brought: Brought, seconds: float) -> StagedWeights:
        self.clock.enter(Phase.STAGED)
        self.staged = staged_weights(self._replies, brought, seconds)
        return self.staged

    async def _apply(self) -> Weights:
        """Has every rank take what is staged; returns what serves now."""
        staged = self._known()
        self.clock.enter(Phase.COPYING)
        try:
            replies = await self.instance.ranks.in_time(ApplyUpdate(), Applied, self._most_seconds)
        except EngineError as error:
            raise await self.lost(error) from error
        for rank, reply in zip(staged.ranks, replies, strict=True):
            rank.seconds_copied = reply.seconds_copied
        return self._switch()

    @property
    def _most_seconds(self) -> float:
        """Time in which ranks must have copied: one that hangs is treated like one that died."""
        most = max(rank.bytes_changed for rank in self._known().ranks)
        patience = self.instance.config.collective_timeout_seconds
        return patience + most / SLOWEST_BYTES_PER_SECOND

    def _switch(self) -> Weights:
        """Says what serves now; nothing in between waits, so nobody sees a part of it."""
        instance = self.instance
        instance.manifests = self._manifests
        instance.probe = self._probe
        relayed = isinstance(self.wanted.source, RelaySource)
        instance.load_reports = [] if relayed else [reply.report for reply in self._replies]
        instance.codec, instance.files = self._codec, self._files
        weights = Weights(
            self.wanted.version,
            weights_digest(instance.manifests),
            instance.engine.weights.epoch + 1,
        )
        instance.engine.switch(weights)
        return weights

    async def _told(self, pause: PauseReport, weights: Weights, entered: float) -> UpdateReport:
        """Tells the relay, and returns the report.

        After the gate is open: nobody who generates waits for a relay. Until it hears of it, the
        arena's sequence word tells its readers that these are not the weights that it knows.
        """
        seconds = pause.seconds + time.monotonic() - entered
        self.clock.enter(Phase.DONE)
        await self.instance.tell_relay()
        clears = self.wanted.pause.clear_cache
        keeps = pause.mode is PauseMode.KEEP if clears is None else not clears
        return UpdateReport(
            version=weights.version, digest=weights.digest, epoch=weights.epoch,
            staged=self._known(), pause=pause, seconds_paused=seconds, cache_kept=keeps,
            readers=self.readers,
        )  # fmt: skip

    def _known(self) -> StagedWeights:
        if self.staged is None:
            raise WrongState("nothing is staged yet", field="session", found=str(self.phase))
        return self.staged

    def _check_base(self) -> None:
        weights = self.instance.engine.weights
        if (weights.digest, weights.epoch) != self._base:
            raise WrongState(
                "the weights were changed meanwhile: stage anew", field="base_digest",
                expected=self._base[0], found=weights.digest,
            )  # fmt: skip
