"""Processes that stand ready to be ranks: they have imported what a rank is made of."""

from __future__ import annotations

import asyncio

from engine_service.core.rank_worker import RankWorker, spawn


class SpareRanks:
    """Starts processes, some of them before they are needed."""

    def __init__(self, threads: int, shared: tuple[int, ...] = ()) -> None:
        """`shared` descriptors are inherited by each: where ranks meet."""
        self._threads, self._shared = threads, shared
        self._ready: list[RankWorker] = []

    async def fill(self, count: int) -> None:
        """Has so many stand ready."""
        self._ready = [one for one in self._ready if not one.has_ended]
        while len(self._ready) < count:
            self._ready.append(await spawn(-1, self._threads, self._shared))

    async def take(self, rank: int) -> RankWorker:
        """Returns one that stood ready, or else a new one, to be called by this number."""
        while self._ready:
            worker = self._ready.pop(0)
            if not worker.has_ended:
                worker.call(rank)
                return worker
        return await spawn(rank, self._threads, self._shared)

    async def stop(self) -> None:
        """Ends those that stand ready."""
        ready, self._ready = self._ready, []
        await asyncio.gather(*(worker.stop() for worker in ready))
