"""An update in place, a layer at a time, for memory that holds no second model. Plain Python.

Paused from the begin of staging until the commit, at the pace of whoever pushes and commits.
What fails after the first byte, or is abandoned, leaves neither the old weights nor the new
ones: the instance is `FAILED` then, and says so.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from engine_service.core.instance import Instance
from engine_service.core.messages import CheckProbe, Done, Recorded, RecordProbe
from engine_service.core.pausing import PauseReport
from engine_service.core.update import Update
from engine_service.core.update_messages import Applied, ApplyUpdate
from engine_service.core.update_request import (
    Phase,
    RelaySource,
    StagedWeights,
    UpdateReport,
    WeightUpdate,
)
from engine_service.core.update_sources import UpdateSource
from engine_service.errors import EngineError, InvalidRequest, UpdateEnded
from relay_service.core.instance import State

ENDING = (State.DRAINING, State.STOPPED, State.FAILED)


class LayerwiseUpdate(Update):
    """Like `Update`, in the memory of one layer."""

    def __init__(self, instance: Instance, wanted: WeightUpdate) -> None:
        """Raises `InvalidRequest` for what can only be done beside weights that serve."""
        if isinstance(wanted.source, RelaySource):
            raise InvalidRequest(
                "weights of a relay are staged beside those that serve: only what differs takes "
                "memory", field="staging", expected="host", found="layerwise",
            )  # fmt: skip
        if wanted.prompts:
            raise InvalidRequest(
                "prompts are run on weights beside those that serve: in place it would be too late",
                field="probe", hint="stage on the host, or leave the prompts out",
            )  # fmt: skip
        super().__init__(instance, wanted)
        self._paused = AsyncExitStack()
        self._pause: PauseReport | None = None
        self._entered = 0.0
        self._may_have_changed = False

    async def stage(self, source: UpdateSource) -> StagedWeights:
        """Pauses, fills the arenas, and proves what is in them. Stays paused."""
        began = time.monotonic()
        self._check_base()
        self.phase = Phase.PAUSING
        applying = self.instance.pauser.applying(self.wanted.pause)
        self._pause = await self._paused.enter_async_context(applying)
        self._entered = time.monotonic()
        try:
            brought = await self._fill(source, in_place=True)
            self._may_have_changed = True
            await self._agree(brought)
            self.phase = Phase.PROVING
            await self._prove(brought.probe)
        except EngineError as error:
            if self._may_have_changed or self._is_changed(error):
                raise await self.lost(error) from error
            raise
        except BaseException:
            self._may_have_changed = True  # what a caller leaves behind, nobody has looked at
            raise
        return self._is_staged(brought, time.monotonic() - began)

    async def commit(self) -> UpdateReport:
        """Says that the weights are whole, and lets them serve."""
        staged, pause = self._known(), self._pause
        if pause is None:
            raise UpdateEnded("its staging has ended")
        self.phase = Phase.COPYING
        try:
            replies = await self.instance.ranks.same(ApplyUpdate(), Applied)
        except EngineError as error:
            raise await self.lost(error) from error
        for rank, reply in zip(staged.ranks, replies, strict=True):
            rank.seconds_copied = reply.seconds_copied
        weights = self._switch()
        self._may_have_changed = False
        await self._paused.aclose()
        return await self._told(pause, weights, self._entered)

    async def drop(self) -> None:
        """Goes back to what served, where nothing has changed; else the instance is lost."""
        if self._may_have_changed and self.instance.lifecycle.state not in ENDING:
            await self.lost(UpdateEnded("it was abandoned"))
        await super().drop()
        await self._paused.aclose()

    async def _prove(self, probe: bytes) -> None:
        ranks = self.instance.ranks
        if probe:
            await ranks.same(CheckProbe(probe), Done)
            self._probe = probe
        else:
            self._probe = (await ranks.same(RecordProbe(), Recorded))[0].probe

    def _is_changed(self, error: EngineError) -> bool:
        """Whether a rank may have written. What one of several says is not said for the others."""
        alone = len(self.instance.manifests) == 1
        written = error.details.get("changed") == "yes" or self.watched.bytes_done > 0
        return self.phase is Phase.STAGING and (written or (self._filling and not alone))
