"""Copies from mapped arena to mapped arena on one host. No torch, no gRPC.

The engine of the source is not asked and does not notice: the relay reads the
pages that it maps. Two threads copy, since one core alone does not fill the
memory bus; `ctypes.memmove` and xxhash both release the GIL.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial

from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.instance import Instance
from relay_service.core.leases import Lease
from relay_service.core.manifest import BLOCK_BYTES, Manifest
from relay_service.core.ports import Land
from relay_service.core.rate import Limits, TokenBucket
from relay_service.core.together import in_thread, together

_THREADS = min(2, os.cpu_count() or 1)


class ShmTransport:
    """Reaches sources that are attached to this very relay."""

    name = "shm"

    def __init__(self, holdings: Holdings, egress: TokenBucket) -> None:
        self._holdings = holdings
        self._egress = egress

    async def unusable(self, source: Instance) -> str:
        """Says so when the source is not attached to this relay."""
        holding = self._holdings.find(source.instance, source.generation)
        return "" if holding else f"{source.instance} is not on this host"

    async def open(self, source: Instance, holder: str, *, yields: bool = False) -> ShmSession:
        """Takes a lease for `holder`. Raises `NotFound`, `Refused` or `NotYet`.

        Memory isn't a link that one reader fills, so nobody has to yield.
        """
        del yields
        if source.weights.epoch == 0:
            await self._holdings.filled(source.instance, source.generation)
        lease = self._holdings.acquire(
            source.instance, source.generation, source.weights.epoch, source.weights.digest, holder
        )
        holding = self._holdings.get(source.instance, source.generation)
        return ShmSession(self._holdings, holding, lease, self._egress)


class ShmSession:
    """A lease on a holding of this relay."""

    def __init__(
        self, holdings: Holdings, holding: Holding, lease: Lease, egress: TokenBucket
    ) -> None:
        self._holdings = holdings
        self._holding = holding
        self._lease = lease
        self._egress = Limits(egress, holding.egress)
        self._offer = holding.offered.at(lease.epoch)
        self.upstream = self._offer.upstream if self._offer else ()

    async def manifest(self, rank: int, holder: Instance | None = None) -> Manifest:
        """Returns the manifest of one rank; nobody else need be asked."""
        del holder
        held = self._lease
        return await self._holdings.manifest(held.instance, held.generation, rank, epoch=held.epoch)

    async def read(self, rank: int, blocks: Sequence[int], land: Land, limit: TokenBucket) -> None:
        """Copies blocks, in batches and on threads of their own."""
        todo = deque(blocks)
        threads = 1 if self._offer else _THREADS  # it waits for the next block in order
        await together(*(self._copy_all(rank, todo, land, limit) for _ in range(threads)))

    async def _copy_all(self, rank: int, todo: deque[int], land: Land, limit: TokenBucket) -> None:
        batch = min(limit.batch_blocks, self._egress.batch_blocks)
        try:
            while todo:
                await self._holdings.arrival(self._lease.lease, rank, todo[0])
                nbytes = min(batch, len(todo)) * BLOCK_BYTES
                await limit.take(nbytes)
                await self._egress.take(nbytes)
                self._holdings.leases.use(self._lease.lease)
                copied = await in_thread(partial(self._copy, rank, todo, batch, land))
                self._holdings.leases.served(self._lease, ShmTransport.name, copied)
        except BaseException:
            todo.clear()  # the other thread need not go on for nothing
            raise

    def _copy(self, rank: int, todo: deque[int], batch: int, land: Land) -> int:
        manifest, copied = self._holding.manifest(rank, epoch=self._lease.epoch), 0
        for _ in range(batch):
            try:
                index = todo.popleft()
            except IndexError:  # the other thread has taken the last one
                break
            block = manifest.block(index)
            if copied and not self._holding.offered.has(rank, index, self._lease.epoch):
                todo.appendleft(index)  # still to come: to be waited for elsewhere
                break
            with self._holding.reading(rank, self._lease.epoch, index) as arena:
                land(index, arena.view(block.offset, block.nbytes))
            copied += block.nbytes
        return copied

    async def probe(self) -> bytes:
        """Returns the probe that the source recorded."""
        return self._offer.probe if self._offer else self._holding.probe

    async def close(self) -> None:
        """Gives the lease back."""
        self._holdings.leases.release(self._lease.lease)
