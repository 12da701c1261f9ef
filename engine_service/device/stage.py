"""One set of new weights, from the first byte that comes to the last: where, and how far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from engine_service.core.load_report import LoadReport
from engine_service.core.update_messages import (
    FileIdentity,
    OpenStaging,
    PushedHeader,
    StagePiece,
    UpdateStaged,
)
from engine_service.device.arena import Shadow, Weights
from engine_service.device.checkpoint import Checkpoint, TensorHeader, open_checkpoint
from engine_service.device.identity import check_same, identities
from engine_service.device.intake import Filled, Intake, LoadOptions
from engine_service.device.landing import Update
from engine_service.device.lent import Lent
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Llama
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.device.pushed import Pushed
from engine_service.device.reading import equal_bytes, read_files
from engine_service.device.sharding import rank_config
from engine_service.errors import ArenaError, ResourceExhausted, WrongState
from relay_service.core.manifest import Block, Manifest
from relay_service.memory.host import available_bytes

if TYPE_CHECKING:
    from engine_service.device.rank import Rank

Progress = Callable[[int, int], None]


class Stage:
    """New weights of a rank. `close` gives their memory back."""

    def __init__(self, rank: Rank, command: OpenStaging) -> None:
        """Makes room. Raises `WrongState` where other weights serve, `ResourceExhausted`."""
        arena = rank.arena
        difference = arena.manifest.layout_difference(command.serves)
        if difference or not command.serves.verified:
            raise WrongState(f"other weights serve than were named: {difference or 'unverified'}")
        self._rank, self._arena = rank, arena
        self._partial, self._narrow = command.partial, command.narrow
        self._serves = command.serves
        self._sequence = arena.sequence
        self._shadow: Shadow | None = None if command.in_place else arena.shadow()
        self._slices = llama_format.checkpoint_slices(rank.config, rank.shard, rank.layout)
        self._source: Intake | Pushed | Lent | None = None
        self._landed: Filled | None = None
        self._notes: list[str] = []
        self.staged: UpdateStaged | None = None

    @property
    def weights(self) -> Weights:
        """Where they are put together."""
        return self._shadow or self._arena

    @property
    def manifest(self) -> Manifest:
        """Of the new weights, with digests, once they are whole."""
        return self.staged.manifest if self.staged else self._serves

    @property
    def outdated(self) -> bool:
        """Whether what serves is no more what it was; that this one began to write is not."""
        return self._arena.sequence - self._sequence > (self._shadow is None)

    @property
    def lent(self) -> Lent | None:
        """Memory that is lent to a relay."""
        return self._source if isinstance(self._source, Lent) else None

    @property
    def changed(self) -> list[Block]:
        """Blocks that differ from those that serve."""
        return self._differing(self.manifest)

    @property
    def to_copy(self) -> list[Block]:
        """Blocks that are not in the arena yet."""
        return self.changed if self._shadow else []

    def check_empty(self) -> None:
        """Raises `WrongState` where a source has brought something already."""
        if self._source or self.staged:
            raise WrongState("weights are staged from one source, once")

    def disk(
        self, folder: Path, bytes_per_second: int, progress: Progress
    ) -> tuple[FileIdentity, ...]:
        """Reads a folder; returns which files were read, all the same at the end.

        `check_empty` comes first. Raises `CheckpointError` and `ResourceExhausted`.
        """
        before = identities(folder)
        checkpoint = open_checkpoint(folder).without(self._unread)
        stored = checkpoint.tensors
        self._source = intake = self._prepared(
            checkpoint, lambda: equal_bytes(stored[HEAD], stored[EMBEDDING])
        )
        read = read_files(stored, intake.collector, bytes_per_second, progress)
        return check_same(before, read)

    def headers(self, tensors: Sequence[PushedHeader]) -> None:
        """Takes note of what will be pushed. Raises `CheckpointError`, `ResourceExhausted`."""
        self.check_empty()

        def prepare(found: Mapping[str, TensorHeader], equal: Callable[[], bool]) -> Intake:
            return self._prepared(Checkpoint(found).without(self._unread), equal)

        self._source = Pushed(tensors, prepare, self._slices)

    def piece(self, piece: StagePiece, progress: Progress) -> None:
        """Takes a pushed piece. Raises what `Pushed.add` does."""
        if self.staged or not isinstance(self._source, Pushed):
            raise WrongState("nothing was announced that could be pushed")
        self._source.add(piece)
        collector = self._source.intake.collector
        progress(collector.bytes_landed, collector.bytes_total)

    def lend(self, memory: Lent) -> None:
        """Takes memory that a relay is to land in."""
        try:
            self.check_empty()
        except WrongState:
            memory.close()
            raise
        self._source = memory

    def land(self, landed: Manifest, progress: Progress) -> None:
        """Takes what a relay has landed, and verifies it.

        Raises `ArenaError` naming a block that is not what it should be.
        """
        lent = self.lent
        if lent is None or self._landed:
            raise WrongState("no memory is lent that could have been filled")
        difference = self._arena.manifest.layout_difference(landed)
        if difference or not landed.verified:
            raise ArenaError(f"other weights have landed: {difference or 'they have no digests'}")
        coming = self._differing(landed)
        total, done = sum(one.nbytes for one in coming), 0
        for block in coming:
            if self._shadow is None:
                self._arena.begin()
            lent.move(block, self.weights, landed)
            done += block.nbytes
            progress(done, total)
        self.weights.flush()
        lent.close()
        report = LoadReport(bytes_read=total, bytes_held=0, bytes_spilled=0)
        self._landed = Filled(landed, report)

    def finish(self) -> UpdateStaged:
        """Adds what no source brings. Raises `CheckpointError` naming what has not come."""
        if self.staged:
            raise WrongState("staging is finished")
        filled = self._filled()
        changed = self._differing(filled.manifest)
        extra = filled.report.bytes_held + (self._shadow.extra_bytes if self._shadow else 0)
        if self._shadow is None:
            self._notes.append("weights went straight into the arena")
        self._let_go()
        self.staged = UpdateStaged(
            manifest=filled.manifest, blocks_changed=len(changed),
            bytes_changed=sum(one.nbytes for one in changed), report=filled.report,
            extra_bytes=extra, notes=tuple(self._notes),
        )  # fmt: skip
        return self.staged

    def close(self) -> None:
        """Gives all memory back; twice is harmless."""
        self._let_go()
        if self._shadow:
            self._shadow.close()

    def _filled(self) -> Filled:
        computed: dict[str, Tensor] = {}
        if not self._partial and not self.lent:
            computed = llama_format.computed_tensors(self._rank.config)
        if isinstance(self._source, Pushed):
            return self._source.finish(computed, self.weights)
        if isinstance(self._source, Intake):
            return self._source.finish(computed)
        if self._landed is None:
            raise WrongState("nothing has been staged")
        return self._landed

    def _let_go(self) -> None:
        source, self._source = self._source, None
        if source:
            source.close()

    def _prepared(
        self, checkpoint: Checkpoint[TensorHeader], tied_equal: Callable[[], bool]
    ) -> Intake:
        rank, config = self._rank, rank_config(self._rank.config, self._rank.shard)
        model = Llama(config, self.weights.tensors, layout=rank.layout, experts=rank.shard.experts)
        intake = Intake(
            self.weights, checkpoint, self._slices, model.matrices(), tied_equal=tied_equal,
            options=LoadOptions(narrow=self._narrow), update=self._update,
        )  # fmt: skip
        self._check_room(intake.collector.bytes_to_write)
        if self._partial:
            self._notes.append(f"{len(intake.collector.parts)} tensors come, the others stay")
        if HEAD in checkpoint.tensors and HEAD not in self._slices:
            self._notes.append(f"{HEAD} is {EMBEDDING} (tie_word_embeddings): they must be equal")
        return intake

    @property
    def _update(self) -> Update:
        if self._shadow is None:
            return Update(self._serves, self._partial, begin=self._arena.begin)
        return Update(self._serves, self._partial, unchanged=self._shadow.revert)

    @property
    def _unread(self) -> Callable[[str], bool]:
        return llama_format.unread_by(self._rank.config, self._rank.shard)

    def _check_room(self, nbytes: int) -> None:
        """Refuses what would end in the kernel's out-of-memory killer."""
        if self._shadow and self._shadow.grows and nbytes > available_bytes():
            raise ResourceExhausted(
                f"no memory to stage {nbytes} bytes: {available_bytes()} bytes are available",
                hint="stage layerwise, or free memory",
            )

    def _differing(self, manifest: Manifest) -> list[Block]:
        """Returns the blocks of weights that are not those that serve."""
        blocks, serves = map(manifest.block, range(manifest.block_count)), self._serves
        return [b for b in blocks if manifest.block_digest(b.index) != serves.block_digest(b.index)]
