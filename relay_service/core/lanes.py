"""Reads from several sources at once: when one more is worth it, and which is left. Plain Python.

The first source is who the target says that it is filled from. What reads on from the target
waits for that line, in which nobody comes twice. Others are read beside it, and never waited
for: what they lack is free for the first one again after a second at most. So they add nobody
to the line, and readers of the target need not know of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from relay_service.core.instance import Instance
from relay_service.core.lane import Lane, Work
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.pull_report import PathStep, PullReport
from relay_service.core.reading import Copied
from relay_service.errors import SourceFailed

SOURCES_AT_ONCE = 3
LOOK_SECONDS = 0.25
ASK_SECONDS = 1.0
"""Until the fleet is asked for another source again; each time in vain it takes twice as long."""
ASK_SECONDS_AT_MOST = 8.0
WORTH_BLOCKS = 16
"""Missing blocks that make another source worth a lease, while nobody knows how long they take."""
WORTH_SECONDS = 1.0
"""What comes sooner than that needs no other source."""
SILENT_SECONDS = 2.0
"""Who gives nothing for so long is left if another one has nothing to do, and otherwise helped by
whoever has a block more than we."""
FLOOR_BYTES_PER_SECOND = 1 << 20
"""So is who gives less than that."""
SLOW_FRACTION = 0.25
"""A source is left that gives less than this part of what the fastest one gives,"""
SLOW_SECONDS = 3.0
"""after so long,"""
SLOW_BLOCKS = 8
"""where the fastest gives as many in that time: of fewer nobody can tell."""


class Beside(Protocol):
    """Finds further sources; see `Search`."""

    async def ask(self) -> None:
        """Asks the fleet who is there."""

    def beside(self, reading: list[Instance], have_blocks: int, *, any_: bool) -> Instance | None:
        """Chooses one more source of the same weights, if there is one with a free seat."""


class Lanes:
    """The sources that a pull reads from until its target is complete or all were left."""

    def __init__(
        self,
        search: Beside,
        report: PullReport,
        drain: Callable[[Lane], Coroutine[Any, Any, bool]],
        leads: Callable[[Lane, Work], None],
        have_blocks: Callable[[], int],
    ) -> None:
        """`drain` opens a source and reads it; `leads` is told which one the others stand beside.

        `drain` returns whether the target is complete.
        """
        self.work: Work | None = None
        """None until the first source is open."""
        self.first: Lane | None = None
        self._search = search
        self._report = report
        self._drain = drain
        self._leads = leads
        self._have_blocks = have_blocks
        self._lanes: list[Lane] = []

    async def run(self, source: Instance, *, yields: bool) -> bool:
        """Reads from a source and from others beside it; returns whether the target is complete.

        Raises what nobody else could help with. When it ends, all sources are closed.
        """
        self._start(source, yields=yields)
        scout = asyncio.create_task(self._scout())
        try:
            complete = False
            while self._lanes and not complete:
                tasks = {lane.task for lane in self._lanes}
                done, _ = await asyncio.wait({scout, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                results = [task.result() for task in done]
                complete = any(results)
                self._lanes = [lane for lane in self._lanes if lane.task not in done]
                if not complete and self.first not in self._lanes:
                    self._lead(next((one for one in self._lanes if one.session), None))
            return complete
        finally:
            await self._close(scout)

    def opened(self, lane: Lane) -> None:
        """Takes note that a source is open, and that there is work."""
        if self.first not in self._lanes:
            self._lead(lane)

    def _lead(self, lane: Lane | None) -> None:
        self.first = lane
        if lane and self.work:
            self._leads(lane, self.work)

    def _start(self, source: Instance, *, yields: bool) -> None:
        lane = Lane(source, yields, PathStep(source.instance, source.address))
        self._report.path.append(lane.step)
        lane.run(asyncio.create_task(self._drain(lane)))
        self._lanes.append(lane)

    async def _close(self, scout: asyncio.Task[bool]) -> None:
        """Ends what still runs; who reads has nothing left to read, and ends by itself."""
        scout.cancel()
        rest = [lane for lane in self._lanes if not lane.task.done()]
        for lane in rest:
            if not (lane.session and self._all_there):
                lane.task.cancel()
        await asyncio.gather(scout, *(lane.task for lane in rest), return_exceptions=True)

    @property
    def _all_there(self) -> bool:
        return bool(self.work) and not self._missing_blocks

    @property
    def _missing_blocks(self) -> int:
        way = self.work.way if self.work else None
        return sum(len(way.missing(rank)) for rank in way.ranks) if way else 0

    async def _scout(self) -> bool:
        """Looks around as long as it's read: for who is slow, and for who else could be read."""
        ask_at, pause = 0.0, ASK_SECONDS
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._leave_silent()
            self._leave_slow()
            needs_any = self._needs_any
            if not (needs_any or self._needs_more) or time.monotonic() < ask_at:
                continue
            if ask_at:  # whoever found the first source has just asked
                await self._search.ask()
            reading = [lane.source for lane in self._lanes]
            if found := self._search.beside(reading, self._have_blocks(), any_=needs_any):
                self._start(found, yields=True)
            ask_at, pause = time.monotonic() + pause, min(2 * pause, ASK_SECONDS_AT_MOST)

    @property
    def _has_room(self) -> bool:
        """Whether there may be one more: of weights that are copied, one after the other."""
        if not (self.work and isinstance(self.work.way, Copied)):
            return False
        return len(self._lanes) < SOURCES_AT_ONCE and all(lane.session for lane in self._lanes)

    @property
    def _needs_more(self) -> bool:
        """Whether one more would help, though those that are read do what they can."""
        on_this_host = any(lane.step.transport == "shm" for lane in self._lanes)
        if not (self._has_room and self.work) or on_this_host:
            return False
        rates = [lane.pace.rate for lane in self._lanes]
        rate, limit = sum(one or 0.0 for one in rates), self.work.limit.bytes_per_second
        missing = self._missing_blocks
        if None in rates or not rate:
            return not limit and missing >= WORTH_BLOCKS * len(rates)
        if limit and rate > 0.9 * limit:
            return False
        return missing * BLOCK_BYTES > WORTH_SECONDS * rate

    @property
    def _needs_any(self) -> bool:
        """Whether those that are read give next to nothing."""
        if not (self._has_room and self.work and self._lanes):
            return False
        limit, patience = self.work.limit.bytes_per_second, self._patience(self.work)
        floor = min(FLOOR_BYTES_PER_SECOND, limit / 4) if limit else FLOOR_BYTES_PER_SECOND
        rates = [lane.pace.rate for lane in self._lanes]
        starved = None not in rates and sum(one or 0.0 for one in rates) < floor
        busy = min(lane.pace.busy_seconds for lane in self._lanes) > patience
        silent = all(lane.pace.silent_seconds > patience for lane in self._lanes)
        return silent or (starved and busy)

    def _patience(self, work: Work) -> float:
        """Returns for how long a source may be silent; a limit of the pull makes all of them so."""
        limit = work.limit.bytes_per_second
        return SILENT_SECONDS + (len(self._lanes) * 4 * BLOCK_BYTES / limit if limit else 0.0)

    def _leave_silent(self) -> None:
        """Leaves who gives nothing of what another one could give at once."""
        idle = [lane for lane in self._lanes if lane.session and lane.pace.idle and not lane.why]
        for lane in self._lanes:
            if not (idle and self.work) or lane.why:
                continue
            if lane.pace.silent_seconds > self._patience(self.work):
                name = idle[0].source.instance
                lane.leave(SourceFailed(
                    f"slow: nothing came for {lane.pace.silent_seconds:.1f} s, {name} has it too"
                ))  # fmt: skip

    def _leave_slow(self) -> None:
        """Leaves who gives far less than another one: it gives more to somebody else."""
        rates = [(lane.pace.rate or 0.0, lane) for lane in self._lanes if lane.session]
        if len(rates) < 2:
            return
        best, fastest = max(rates, key=lambda one: one[0])
        if best * SLOW_SECONDS < SLOW_BLOCKS * BLOCK_BYTES:
            return
        for rate, lane in rates:
            slow = rate < SLOW_FRACTION * best and lane.pace.busy_seconds >= SLOW_SECONDS
            if slow and not lane.why:
                lane.leave(SourceFailed(
                    f"slow: {rate / BLOCK_BYTES:.1f} MiB/s, while {fastest.source.instance} "
                    f"gives {best / BLOCK_BYTES:.1f} MiB/s"
                ))  # fmt: skip
