"""An update in place, a layer at a time, for memory that holds no second model. Plain Python.

Paused from the begin of staging until the commit, at the pace of whoever pushes and commits.
What fails after the first byte, or is abandoned, leaves neither the old weights nor the new
ones: the instance is `FAILED` then, and says so.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from engine_service.core.instance import Instance
from engine_service.core.messages import Done
from engine_service.core.pause_modes import PauseReport
from engine_service.core.update import Update
from engine_service.core.update_messages import DropStaging
from engine_service.core.update_readers import closed_to_readers
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

    in_place = True

    def __init__(self, instance: Instance, wanted: WeightUpdate) -> None:
        """Raises `InvalidRequest` for a relay, whose weights land beside those that serve."""
        if isinstance(wanted.source, RelaySource):
            raise InvalidRequest(
                "weights of a relay are staged beside those that serve: only what differs takes "
                "memory", field="staging", expected="host", found="layerwise",
            )  # fmt: skip
        super().__init__(instance, wanted)
        self._paused = AsyncExitStack()
        self._pause: PauseReport | None = None
        self._entered = 0.0

    async def stage(self, source: UpdateSource) -> StagedWeights:
        """Pauses, fills the arenas, and proves what is in them. Stays paused."""
        self._check_base()
        self.clock.enter(Phase.READERS)
        applying = self.instance.pauser.applying(self.wanted.pause)
        async with closed_to_readers(self.instance, self.wanted, self.watched) as self.readers:
            self.clock.enter(Phase.PAUSING)
            self._pause = await self._paused.enter_async_context(applying)
        self._entered = time.monotonic()
        await self.instance.tell_relay()  # for as long as it takes, nobody shall count on it
        try:
            return await super().stage(source)
        except EngineError as error:
            if await self._is_unchanged():
                raise
            raise await self.lost(error) from error

    async def commit(self) -> UpdateReport:
        """Says that the weights are whole, and lets them serve."""
        pause = self._pause
        if pause is None:
            raise UpdateEnded("nothing is staged")
        weights = await self._apply()
        await self._paused.aclose()
        return await self._told(pause, weights, self._entered)

    async def drop(self) -> None:
        """Goes back to what served, where nothing has changed; else the instance is lost."""
        unchanged = await self._is_unchanged()
        if not unchanged and self.instance.lifecycle.state not in ENDING:
            await self.lost(UpdateEnded("it was abandoned"))
        await self._paused.aclose()

    async def _is_unchanged(self) -> bool:
        """Drops what is staged; ranks refuse that when they have written over what served."""
        try:
            await self.instance.ranks.stage_same(DropStaging(), Done)
        except EngineError:
            return False
        return True
