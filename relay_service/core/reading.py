"""Reads what a target lacks from an open source: rank by rank, or cut anew. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from relay_service.core.instance import Instance
from relay_service.core.layout import check
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.match import Target, placed_otherwise
from relay_service.core.ports import Place, SourceSession
from relay_service.core.pull_report import PathStep, PullReport
from relay_service.core.rate import TokenBucket
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed, Recut
from relay_service.core.together import in_thread, together
from relay_service.errors import CorruptBlock, FormatMismatch, NotYet, SourceFailed

CORRUPTIONS_PER_SOURCE = 2
NOT_YETS_PER_SOURCE = 3
"""Answers in a row, of a second each, that the next block has not come yet."""
MAX_RANKS = 1024


class Copied:
    """The way from each rank of a source to the same rank of a target, block by block."""

    def __init__(self, sources: Sequence[Manifest], receivers: Sequence[Receiver]) -> None:
        """Says what shall land; blocks that are there already are kept."""
        self._receivers = receivers
        self.manifests = sources
        for receiver, manifest in zip(receivers, sources, strict=True):
            receiver.expect(manifest)

    @property
    def ranks(self) -> range:
        """Ranks to read from."""
        return range(len(self._receivers))

    @property
    def bytes_kept(self) -> int:
        """Bytes that need not be read any more."""
        return sum(receiver.bytes_verified for receiver in self._receivers)

    def missing(self, rank: int) -> list[int]:
        """Flat indexes of the blocks of a rank that have not come, in order."""
        return self._receivers[rank].missing

    def place(self, rank: int, blocks: Sequence[int]) -> AbstractContextManager[Place | None]:
        """Lends the memory where blocks belong; see `Receiver.place`."""
        return self._receivers[rank].place(blocks)

    def land(self, rank: int, index: int, data: memoryview) -> None:
        """Lands and verifies one block. Raises `InvalidRequest` or `CorruptBlock`."""
        self._receivers[rank].land(index, data)


Way = Copied | Recut


@dataclass(frozen=True)
class LandRank:
    """Lands the blocks of one rank of a source: a `LandInPlace`."""

    way: Way
    rank: int

    def __call__(self, index: int, data: memoryview, /) -> None:
        """Lands and verifies one block."""
        self.way.land(self.rank, index, data)

    def place(self, blocks: Sequence[int]) -> AbstractContextManager[Place | None]:
        """Lends the memory where blocks belong."""
        return self.way.place(self.rank, blocks)


_Count = Literal["bytes_moved", "bytes_reread", "bytes_landed", "blocks_landed", "blocks_failed"]


class Reader:
    """Fills the arenas of one target, from one source after another."""

    def __init__(
        self,
        target: Target,
        receivers: list[Receiver],
        landed: Landed,
        limit: TokenBucket,
        report: PullReport,
    ) -> None:
        self._target = target
        self._receivers = receivers
        self._landed = landed
        self._limit = limit
        self._report = report
        self._recuts: list[Recut] = []
        self._dropped = 0
        """Bytes that landed and are of no use to a source that is placed otherwise."""

    def sum(self, count: _Count) -> int:
        """Sums up a count of all ways that were taken."""
        return sum(getattr(one, count) for one in (*self._receivers, *self._recuts))

    @property
    def bytes_reread(self) -> int:
        """Bytes that came and had to be read again."""
        return self.sum("bytes_reread") + self._dropped

    async def prepare(self, session: SourceSession, source: Instance, step: PathStep) -> Way:
        """Finds the way from a source to the target, before a byte moves.

        Raises `ManifestError`, `SourceFailed` for weights that were not announced, and
        `FormatMismatch` or `PartsMissing` for a source that lies otherwise and cannot be cut.
        """
        otherwise = placed_otherwise(self._target, source)
        ranks = len(source.ranks) if otherwise else len(self._receivers)
        if ranks > MAX_RANKS:
            raise SourceFailed(f"{source.instance}: {ranks} ranks, at most {MAX_RANKS} are read")
        manifests = [await session.manifest(rank) for rank in range(ranks)]
        for manifest in manifests:
            check(manifest)
        if weights_digest(manifests) != source.weights.digest:
            raise SourceFailed(f"{source.instance}: its manifest is not of {source.weights.digest}")
        step.recut = otherwise or self._difference(manifests)
        if not step.recut:
            return self._copied(manifests)
        return await in_thread(partial(self._cut_anew, source, manifests, step.recut))

    async def read(self, session: SourceSession, way: Way) -> None:
        """Reads what is missing. Raises what a session's `read` does, and `CorruptBlock`."""
        await together(*(self._read_rank(session, way, rank) for rank in way.ranks))

    async def _read_rank(self, session: SourceSession, way: Way, rank: int) -> None:
        corruptions = in_vain = 0
        while missing := way.missing(rank):
            try:
                await session.read(rank, missing, LandRank(way, rank), self._limit)
            except NotYet as error:
                self._report.note = str(error)
                in_vain = in_vain + 1 if len(way.missing(rank)) == len(missing) else 0
                if in_vain >= NOT_YETS_PER_SOURCE:
                    raise
            except CorruptBlock as error:
                corruptions += 1
                self._report.note = str(error)
                if corruptions > CORRUPTIONS_PER_SOURCE:
                    raise

    def _difference(self, manifests: Sequence[Manifest]) -> str:
        """Says where ranks that are placed alike lie otherwise, as with experts elsewhere."""
        pairs = zip(manifests, self._receivers, strict=True)
        return next(filter(None, (m.layout_difference(r.layout) for m, r in pairs)), "")

    def _copied(self, manifests: Sequence[Manifest]) -> Copied:
        useful = self._useful_bytes if self._landed.sources else 0
        self._landed.forget()
        way = Copied(manifests, self._receivers)
        self._dropped += max(0, useful - way.bytes_kept)
        return way

    def _cut_anew(self, source: Instance, manifests: Sequence[Manifest], otherwise: str) -> Recut:
        try:
            way = Recut(source.instance, manifests, self._receivers, self._landed)
        except FormatMismatch as error:
            raise FormatMismatch(
                f"{source.instance} does not fit: {otherwise}, and {error}",
                **error.details | {"source": source.instance},
            ) from error
        useful = self._useful_bytes
        way.begin()
        self._dropped += max(0, useful - way.bytes_kept)
        self._recuts.append(way)
        self._report.note = f"weights of {source.instance} are cut anew: {otherwise}"
        return way

    @property
    def _useful_bytes(self) -> int:
        """Bytes that landed in this pull and count as such."""
        return self.sum("bytes_landed") - self._dropped
