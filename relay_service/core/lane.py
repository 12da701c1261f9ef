"""One of the sources that a pull reads from at the same time. Plain Python."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from relay_service.core.instance import Instance
from relay_service.core.pace import Pace
from relay_service.core.pool import Claim, Pool, Recalled
from relay_service.core.ports import Place, SourceSession
from relay_service.core.pull_report import PathStep, PullReport
from relay_service.core.rate import TokenBucket
from relay_service.core.reading import Way
from relay_service.core.together import together
from relay_service.errors import CorruptBlock, NotYet, RelayError

CORRUPTIONS_PER_SOURCE = 2
NOT_YETS_PER_SOURCE = 3
"""Answers in a row, of a second each, that the next block has not come yet."""
HOPS_PER_SECOND = 32
"""Through so many others the first block comes in a second, also where links give 32 MiB/s."""


@dataclass(eq=False)
class Work:
    """What a pull reads from all its sources: a way for the blocks, and who is asked for which."""

    way: Way
    pools: list[Pool]
    """By rank to read from."""
    limit: TokenBucket
    report: PullReport


@dataclass(eq=False)
class Lane:
    """A source that is read, from the lease to the end, in a task of its own."""

    source: Instance
    yields: bool
    step: PathStep
    session: SourceSession | None = None
    """None until it is open."""
    probe: bytes = b""
    why: RelayError | None = None
    """Why it is left before its end, where nothing of its own has failed."""
    pace: Pace = field(default_factory=Pace)
    _corruptions: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def upstream(self) -> Sequence[str]:
        """Names everyone whom an incomplete source is filled from, once it is open."""
        return self.session.upstream if self.session else ()

    def run(self, task: asyncio.Task[bool]) -> None:
        """Takes note of the task that reads it."""
        self.task = task

    def leave(self, why: RelayError) -> None:
        """Has it left for a reason that stands in the path."""
        self.why = why
        self.task.cancel()

    async def read(self, work: Work, session: SourceSession) -> None:
        """Reads until all is verified. Raises what a session's `read` does, and `CorruptBlock`."""
        for pool in work.pools:
            pool.join(self.pace)
        try:
            ranks = range(len(work.pools))
            await together(*(self._read_rank(work, session, rank) for rank in ranks))
        finally:
            self._end(work)

    async def _read_rank(self, work: Work, session: SourceSession, rank: int) -> None:
        pool, in_vain = work.pools[rank], 0
        while claim := await pool.claim(self.pace):
            try:
                await session.read(rank, claim.blocks, _Land(self, work, rank, claim), work.limit)
                in_vain = 0
            except Recalled:
                in_vain = 0
            except NotYet as error:
                work.report.note = str(error)
                in_vain = 0 if claim.gave else in_vain + 1
                if in_vain >= self._not_yets:
                    self._end(work)
                    raise
            except CorruptBlock as error:
                work.report.note = str(error)
                self._corruptions += 1
                if self._corruptions > CORRUPTIONS_PER_SOURCE:
                    self._end(work)
                    raise
            except BaseException:
                self._end(work)
                raise
            finally:
                pool.give_back(claim)

    @property
    def _not_yets(self) -> int:
        """How often it may say so: whoever comes late in a long line waits for its first block."""
        hops = 0 if self.step.bytes_verified else len(self.upstream)
        return NOT_YETS_PER_SOURCE + hops // HOPS_PER_SECOND

    def _end(self, work: Work) -> None:
        """Ends the reads of all ranks: one that failed costs no more than the blocks in flight."""
        for pool in work.pools:
            pool.leave(self.pace)

    def came(self, nbytes: int, *, good: int) -> None:
        """Counts bytes that came, and those of them that are right. From any thread."""
        with self._lock:
            self.step.bytes_moved += nbytes
            self.step.bytes_verified += good
        self.pace.landed(nbytes)


@dataclass(frozen=True)
class _Land:
    """Lands what one source was asked for: a `LandInPlace`."""

    lane: Lane
    work: Work
    rank: int
    claim: Claim

    def __call__(self, index: int, data: memoryview, /) -> None:
        """Lands and verifies one block."""
        self._land({index: data}, partial(self.work.way.land, self.rank, index, data))

    @contextmanager
    def place(self, blocks: Sequence[int]) -> Iterator[Place | None]:
        """Lends the memory where blocks belong."""
        with self.work.way.place(self.rank, blocks) as place:
            yield place and Place(place.memory, partial(self._landed, blocks, place))

    def _landed(self, blocks: Sequence[int], place: Place, digests: Sequence[bytes]) -> None:
        came = dict(zip(blocks, place.memory, strict=True))
        self._land(came, partial(place.landed, digests))

    def _land(self, came: Mapping[int, memoryview], land: Callable[[], None]) -> None:
        try:
            land()
        except CorruptBlock as error:
            for index in error.blocks:
                self.work.pools[self.rank].came_wrong(self.lane.pace, index)
            self._count(came, error.blocks)
            raise
        self._count(came)
        if self.claim.recalled:
            raise Recalled

    def _count(self, came: Mapping[int, memoryview], wrong: Sequence[int] = ()) -> None:
        nbytes = sum(map(len, came.values()))
        good = nbytes - sum(len(came[index]) for index in wrong)
        self.claim.gave |= good > 0
        self.lane.came(nbytes, good=good)
