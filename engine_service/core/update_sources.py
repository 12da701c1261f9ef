"""Where the weights of an update come from, behind one port. Plain Python."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_service.core.hashing import Hashing
from engine_service.core.messages import Done
from engine_service.core.model_files import read_folder
from engine_service.core.model_root import ModelRoot
from engine_service.core.ports import FillProgress, RelayLink
from engine_service.core.pushed import Arrivals
from engine_service.core.ranks import RankGroup
from engine_service.core.replies import quiet
from engine_service.core.update_files import check_sums
from engine_service.core.update_messages import (
    FileIdentity,
    PushedHeader,
    StagedFiles,
    StageDisk,
    StageHeaders,
    StageLent,
    StagePiece,
    UpdateStaged,
)
from engine_service.core.update_request import (
    DiskSource,
    RankUpdate,
    RelaySource,
    StagedWeights,
)
from engine_service.errors import CheckpointError, FillFailed, RelayUnreachable
from relay_service.core.manifest import weights_digest
from relay_service.core.pull_report import PathStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What came beside the weights."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    probe: bytes = b""
    """Recorded by who has these weights, to be met; empty to record one."""
    path: Sequence[PathStep] = ()
    notes: Sequence[str] = ()


@dataclass(slots=True)
class Watched:
    """What whoever waits for an update sees of its source."""

    note: str = ""
    bytes_done: int = 0
    bytes_total: int = 0


class UpdateSource(Protocol):
    """Brings weights into the staging of all ranks."""

    async def stage(self, ranks: RankGroup, watched: Watched) -> Brought:
        """Stages all that it has. Raises `EngineError`; then nothing of it may be used."""


class DiskStaging:
    """Has the ranks read a folder; hashes its files beside them where somebody says what they are.

    The files that were hashed are the very ones that were read: the same inode, size and time.
    """

    def __init__(self, root: ModelRoot, wanted: DiskSource) -> None:
        """Raises `InvalidRequest` for a folder outside the model root."""
        self._root = root
        self._wanted = wanted
        self._folder = root.folder(wanted.folder)

    async def stage(self, ranks: RankGroup, watched: Watched) -> Brought:
        """Stages the folder."""
        folder = self._root.folder(self._wanted.folder)  # it may have been changed since
        sums = await asyncio.to_thread(self._root.sums, folder, self._wanted.sha256)
        files = await asyncio.to_thread(read_folder, folder)
        check_sums(files, sums, all_of_them=self._root.signed)
        command = StageDisk(folder=str(folder), bytes_per_second=self._wanted.bytes_per_second)
        hashing = Hashing(folder, sums, self._wanted.bytes_per_second)
        watched.note = f"reading {folder}"
        reading = quiet(asyncio.ensure_future(ranks.stage_same(command, StagedFiles)))
        hashed = asyncio.ensure_future(hashing.run())
        try:
            replies, identities = await asyncio.gather(reading, hashed)
        finally:  # where one fails, nobody waits for the other
            reading.cancel()
            hashed.cancel()
        _check_read([reply.files for reply in replies], identities, checked=bool(sums))
        return Brought(files=files)


class PushStaging:
    """Gives the ranks what a caller sends, a piece at a time, in whatever order it comes."""

    def __init__(self, tensors: Sequence[PushedHeader], pieces: AsyncIterator[StagePiece]) -> None:
        self._tensors = tuple(tensors)
        self._pieces = pieces
        self.on_word: Callable[[], None] = lambda: None
        """Called whenever the caller has sent something, and when it is through."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called whenever it is the caller's turn."""

    async def stage(self, ranks: RankGroup, watched: Watched) -> Brought:
        """Stages all pieces; the caller is asked for the next one when one is staged."""
        arrivals = Arrivals(self._tensors)
        watched.bytes_total = arrivals.bytes_total
        watched.note = "waiting for tensors"
        self.on_word()
        await ranks.stage_same(StageHeaders(self._tensors), Done)
        self.on_wait()
        async for piece in self._pieces:
            self.on_word()
            arrivals.add(piece)
            await ranks.stage_same(piece, Done)
            watched.bytes_done += len(piece.data)
            self.on_wait()
        self.on_word()
        arrivals.check_complete()
        return Brought()


class RelayStaging:
    """Has the relay of this host land what differs in memory that the ranks lend."""

    def __init__(self, link: RelayLink, wanted: RelaySource) -> None:
        self._link = link
        self._wanted = wanted

    async def stage(self, ranks: RankGroup, watched: Watched) -> Brought:
        """Stages the blocks that differ."""

        def show(progress: FillProgress) -> None:
            source = f" from {progress.source_instance}" if progress.source_instance else ""
            watched.note = progress.note or f"{progress.phase}{source}"
            watched.bytes_done, watched.bytes_total = progress.bytes_verified, progress.bytes_total

        descriptors = await ranks.lend()
        try:
            report, landed = await self._link.stage(descriptors, self._wanted.options, show)
        finally:
            for fd in (fd for of_rank in descriptors for fd in of_rank):
                os.close(fd)
        await ranks.stage([StageLent(manifest) for manifest in landed], Done)
        try:
            files, notes = await self._link.source_files(report), []
        except (FillFailed, RelayUnreachable) as error:
            files, notes = {}, [f"tokenizer and configuration stay as they are: {error.message}"]
        return Brought(files=files, probe=report.probe, path=report.path, notes=notes)


def staged_weights(
    replies: Sequence[UpdateStaged], brought: Brought, seconds: float
) -> StagedWeights:
    """Says what is staged on all ranks, and how long that took."""
    notes = dict.fromkeys(note for reply in replies for note in reply.notes)
    return StagedWeights(
        ranks=[
            RankUpdate(
                rank=number, bytes_changed=reply.bytes_changed, seconds_staged=seconds,
                extra_bytes=reply.extra_bytes, bytes_read=reply.report.bytes_read,
                digest=reply.manifest.digest, conversions=reply.report.conversions,
            )
            for number, reply in enumerate(replies)
        ],
        digest=weights_digest([reply.manifest for reply in replies]), seconds=seconds,
        notes=[*notes, *brought.notes], path=list(brought.path),
    )  # fmt: skip


def _check_read(
    read: Sequence[Sequence[FileIdentity]], hashed: Mapping[str, FileIdentity], *, checked: bool
) -> None:
    """All ranks must have read the same files, and those that were hashed.

    Raises `CheckpointError`.
    """
    known: dict[str, FileIdentity] = dict(hashed)
    for one in (one for of_rank in read for one in of_rank):
        if checked and one.name not in hashed:
            raise CheckpointError(
                f"{one.name} is not among the files that were given", file=one.name
            )
        if known.setdefault(one.name, one) != one:
            raise CheckpointError(f"{one.name} was replaced while it was read", file=one.name)
