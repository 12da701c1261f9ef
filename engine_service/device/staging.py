"""New weights of one rank, put together beside those that serve, and then put in their place.

open ─▶ disk | headers, pieces | lent memory ─▶ finish ─▶ prove ─▶ apply

All but `apply` changes nothing that serves, and may take long: it happens in a thread of its
own while steps run. `apply` comes between two steps; what can fail has failed before, and
if it fails all the same the rank holds neither the old weights nor the new ones and must end.
Only staging in place writes into the arena itself, while nothing is served from it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from engine_service.core.messages import Done
from engine_service.core.update_messages import (
    Applied,
    DropStaging,
    FinishStaging,
    LendStaging,
    OpenStaging,
    Proven,
    ProveStaged,
    StagedFiles,
    StageDisk,
    StageHeaders,
    StageLent,
    StagePiece,
    StagingCommand,
    StagingReply,
)
from engine_service.core.update_messages import Lent as LentReply
from engine_service.device.arena import Arena
from engine_service.device.lent import Lent
from engine_service.device.proof import prove
from engine_service.device.stage import Stage
from engine_service.errors import ArenaError, WrongState
from relay_service.core.manifest import Block

if TYPE_CHECKING:
    from engine_service.device.rank import Rank

Progress = Callable[[int, int], None]


class Staging:
    """What a rank has staged; nothing at first."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._busy = threading.Lock()
        self._stage: Stage | None = None
        self._releasing: threading.Thread | None = None
        self._proofs = 0
        self._outlived = False

    @property
    def changed(self) -> bool:
        """Whether what serves has been written, and not to the end: it cannot be served."""
        return not self._arena.whole

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of the memory that is lent."""
        lent = self._stage and self._stage.lent
        return (lent.fd,) if lent else ()

    def answer(
        self, command: StagingCommand, progress: Progress = lambda _done, _total: None
    ) -> StagingReply | Done:
        """Does what the front asks; `progress` is told bytes done and bytes in all.

        Raises `WrongState` for a command out of its order, and what the messages say.
        """
        with self._busy:
            self._drop_outlived()
            match command:
                case OpenStaging():
                    self._open(command)
                case DropStaging():
                    self._drop()
                case StageDisk():
                    return self._disk(command, progress)
                case StageHeaders():
                    self._staging.headers(command.tensors)
                case StagePiece():
                    self._staging.piece(command, progress)
                case LendStaging():
                    return self._lend()
                case StageLent():
                    self._staging.land(command.landed, progress)
                case FinishStaging():
                    return self._staging.finish()
                case ProveStaged():
                    return self._prove(command)
            return Done()

    def apply(self) -> Applied:
        """Copies blocks that differ into the arena, and verifies each: between two steps.

        Raises `WrongState`, and nothing has changed, where nothing is staged for just the
        weights that serve; `ArenaError`, and they are lost, for bytes that arrived wrong.
        """
        if not self._busy.acquire(blocking=False):
            raise WrongState("weights are still being staged")
        try:
            self._drop_outlived()
            stage, arena = self._finished, self._arena
            if stage.outdated:
                self._drop()
                raise WrongState(
                    "the weights that serve have changed since others were staged: stage anew",
                    hint="experts are moved before an update begins, or after it",
                )
            began = time.monotonic()
            with arena.committing():
                copied = _copied(stage, arena, self._rank.device.copy_threads)
            seconds = time.monotonic() - began
            self._release(stage)
            return Applied(copied, seconds)
        finally:
            self._busy.release()

    def outlive(self) -> None:
        """Drops what is staged, since others compute together now; without waiting.

        What a command is at work on it finds dropped at the next one.
        """
        self._outlived = True
        if self._busy.acquire(blocking=False):
            try:
                self._drop_outlived()
            finally:
                self._busy.release()

    def _drop_outlived(self) -> None:
        if self._outlived:
            self._outlived, self._proofs = False, 0
            self._forget()

    @property
    def _arena(self) -> Arena:
        return self._rank.arena

    @property
    def _staging(self) -> Stage:
        if self._stage is None:
            raise WrongState("nothing is being staged")
        return self._stage

    @property
    def _finished(self) -> Stage:
        if self._staging.staged is None:
            raise WrongState("staging is not finished")
        return self._staging

    def _open(self, command: OpenStaging) -> None:
        """Makes room. Only all weights, in place, can follow some that were lost half-way."""
        if not self._arena.sealed:
            raise WrongState("the arena is not sealed: no weights serve that could be updated")
        if self.changed and (command.partial or not command.in_place):
            raise WrongState("the weights were left half-changed")
        self._forget()
        self._stage = Stage(self._rank, command)

    def _disk(self, command: StageDisk, progress: Progress) -> StagedFiles:
        stage = self._staging
        stage.check_empty()
        try:
            files = stage.disk(Path(command.folder), command.bytes_per_second, progress)
        except BaseException:
            self._forget()  # what has come of a folder is of no use without the rest
            raise
        return StagedFiles(files)

    def _lend(self) -> LentReply:
        self._staging.lend(Lent(self._arena.manifest, self._rank.generation))
        return LentReply(1)

    def _prove(self, command: ProveStaged) -> Proven:
        self._proofs += 1  # on every rank alike, whatever becomes of it
        weights = self._finished.weights
        return Proven(prove(self._rank, weights, command, self._proofs))

    def _drop(self) -> None:
        self._forget()
        if self.changed:
            raise ArenaError(
                "weights were staged in place: those that served are lost",
                hint="restart this instance, or fill it anew",
            )

    def _forget(self) -> None:
        if self._releasing:
            self._releasing.join()
        stage, self._stage, self._releasing = self._stage, None, None
        if stage:
            stage.close()

    def _release(self, stage: Stage) -> None:
        """Gives memory back while steps go on: to free it takes a good part of a copy's time."""
        self._stage = None
        self._releasing = threading.Thread(target=stage.close, name="release", daemon=True)
        self._releasing.start()


def _copied(stage: Stage, arena: Arena, threads: int) -> int:
    """Copies what differs; returns how many bytes. Raises `ArenaError`."""
    blocks = stage.to_copy
    share = max(1, -(-len(blocks) // threads))
    shares = [blocks[first : first + share] for first in range(0, len(blocks), share)]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(functools.partial(_copied_share, stage, arena), shares))


def _copied_share(stage: Stage, arena: Arena, blocks: Sequence[Block]) -> int:
    copied, manifest = 0, stage.manifest
    for block in blocks:
        if arena.take(stage.weights, block) != manifest.block_digest(block.index):
            raise ArenaError(
                f"block {block.index} ({manifest.tensor_at(block.index)}) arrived with other "
                "bytes than were staged",
                tensor=manifest.tensor_at(block.index),
            )
        copied += block.nbytes
    return copied
