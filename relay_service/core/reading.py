"""Finds the way from an open source to a target: rank by rank, or cut anew. Plain Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from relay_service.core.instance import Instance
from relay_service.core.layout import check
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.match import Target, placed_otherwise
from relay_service.core.ports import Place, SourceSession
from relay_service.core.pull_report import PathStep, PullReport
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed, Recut
from relay_service.core.together import in_thread
from relay_service.core.twins import Twins
from relay_service.errors import FormatMismatch, ManifestError, NotYet, SourceFailed

MAX_RANKS = 1024
MANIFEST_NOT_YETS = 2
"""Answers of a second each that a manifest has not come yet, after which it's asked for again."""


class Copied:
    """The way from each rank of a source to the same rank of a target, block by block."""

    def __init__(self, sources: Sequence[Manifest], receivers: Sequence[Receiver]) -> None:
        """Says what shall land; blocks that are there already are kept, and copied.

        Copying takes its time: not for an event loop. Raises `ResourceExhausted`.
        """
        self._receivers = receivers
        self.manifests = sources
        for receiver, manifest in zip(receivers, sources, strict=True):
            receiver.expect(manifest)
        self._twins = Twins(receivers)
        self._twins.settle()

    @property
    def ranks(self) -> range:
        """Ranks to read from."""
        return range(len(self._receivers))

    @property
    def bytes_kept(self) -> int:
        """Bytes that need not be read any more."""
        return sum(receiver.bytes_verified for receiver in self._receivers)

    def missing(self, rank: int) -> list[int]:
        """Flat indexes of the blocks of a rank that have not come, in order.

        Of blocks that are the same bytes, on whatever rank, only the first one has to.
        """
        return self._twins.to_read(rank)

    def unit(self, rank: int, index: int) -> int:
        """Returns the index of the unit that a block belongs to."""
        return self.manifests[rank].block(index).unit

    @contextmanager
    def place(self, rank: int, blocks: Sequence[int]) -> Iterator[Place | None]:
        """Lends the memory where blocks belong; see `Receiver.place`."""
        with self._receivers[rank].place(blocks) as place:
            yield place and Place(place.memory, partial(self._landed, rank, blocks, place))

    def land(self, rank: int, index: int, data: memoryview) -> None:
        """Lands and verifies one block, wherever it belongs.

        Raises `InvalidRequest` or `CorruptBlock`, or `ResourceExhausted`.
        """
        self._receivers[rank].land(index, data)
        self._twins.landed(rank, index, data)

    def _landed(
        self, rank: int, blocks: Sequence[int], place: Place, digests: Sequence[bytes]
    ) -> None:
        try:
            place.landed(digests)
        finally:  # beside one that is wrong others are right
            for index, memory in zip(blocks, place.memory, strict=True):
                self._twins.landed(rank, index, memory)


Way = Copied | Recut


_Count = Literal["bytes_moved", "bytes_reread", "bytes_landed", "blocks_landed", "blocks_failed"]


class Reader:
    """Fills the arenas of one target, from one source after another."""

    def __init__(
        self,
        target: Target,
        receivers: list[Receiver],
        landed: Landed,
        report: PullReport,
    ) -> None:
        self._target = target
        self._receivers = receivers
        self._landed = landed
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

    async def prepare(
        self, session: SourceSession, source: Instance, step: PathStep,
        manifest_holder: Instance | None = None,
    ) -> Way:  # fmt: skip
        """Finds the way from a source to the target, before a byte moves.

        What blocks there are somebody else may know before the source does.
        Raises `ManifestError`, `SourceFailed` for weights that were not announced, and
        `FormatMismatch` or `PartsMissing` for a source that lies otherwise and cannot be cut.
        """
        otherwise = placed_otherwise(self._target, source)
        ranks = len(source.ranks) if otherwise else len(self._receivers)
        if ranks > MAX_RANKS:
            raise SourceFailed(f"{source.instance}: {ranks} ranks, at most {MAX_RANKS} are read")
        try:
            manifests = await _manifests(session, source, ranks, manifest_holder)
        except (ManifestError, SourceFailed):
            if not manifest_holder:
                raise
            manifests = await _manifests(session, source, ranks)
        step.recut = otherwise or self._difference(manifests)
        if not step.recut:
            return await in_thread(partial(self._copied, manifests))
        return await in_thread(partial(self._cut_anew, source, manifests, step.recut))

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


async def _patient_manifest(session: SourceSession, rank: int, holder: Instance | None) -> Manifest:
    """Returns a manifest that is on its way through others. Raises `NotYet` after some seconds."""
    for _ in range(MANIFEST_NOT_YETS):
        with contextlib.suppress(NotYet):
            return await session.manifest(rank, holder)
    return await session.manifest(rank, holder)


async def _manifests(
    session: SourceSession, source: Instance, ranks: int, holder: Instance | None = None
) -> list[Manifest]:
    """Returns the manifests of a source's weights. Raises `ManifestError` and `SourceFailed`."""
    manifests = [await _patient_manifest(session, rank, holder) for rank in range(ranks)]
    for manifest in manifests:
        check(manifest)
    if weights_digest(manifests) != source.weights.digest:
        whose = (holder or source).instance
        raise SourceFailed(f"{whose}: its manifest is not of {source.weights.digest}")
    return manifests
