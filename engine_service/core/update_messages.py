"""Messages between the front and a rank that change weights; see `messages`.

A rank has a second ordered stream beside the one of its steps: what is staged there, is
staged while it serves. Only `ApplyUpdate` comes between two steps.
"""

from __future__ import annotations

import os

import msgspec

from engine_service.core.load_report import LoadReport
from relay_service.core.manifest import Manifest


class OpenStaging(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Makes room for new weights beside those that serve. Answered by `Done`.

    What was staged before, and never applied, is forgotten.
    """

    serves: Manifest
    """Of this rank, with the digests of what serves."""
    partial: bool = False
    """Whether tensors that do not come stay as they are; else a missing one is an error."""
    narrow: bool = False
    """Whether tensors may lose bits in the arena's type: it was asked for."""
    in_place: bool = False
    """Whether weights go straight into the arena, while nothing is served."""


class StageDisk(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stages a checkpoint folder. Answered by `Progress`, again and again, then `StagedFiles`."""

    folder: str
    bytes_per_second: int = 0
    """Most bytes to read in a second; 0 for no limit."""


class PushedHeader(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that will be pushed."""

    name: str
    dtype: str
    """As safetensors calls it, such as `BF16`."""
    shape: tuple[int, ...]
    digest: bytes = b""
    """XXH3-128 of its bytes; empty for one that is not checked so."""


class StageHeaders(msgspec.Struct, frozen=True, tag=True):
    """Says what will be pushed, all of it; checks that it fits. Answered by `Done`."""

    tensors: tuple[PushedHeader, ...]


class StagePiece(msgspec.Struct, frozen=True, tag=True):
    """Stages a piece of a pushed tensor. Answered by `Done`, once its bytes are staged."""

    tensor: int
    """Index in `StageHeaders`."""
    offset: int
    """First byte of the piece within the whole tensor; a whole number of elements."""
    data: bytes


class LendStaging(msgspec.Struct, frozen=True, tag=True):
    """Makes memory for a relay to land blocks in. Answered by `Lent`."""


class StageLent(msgspec.Struct, frozen=True, tag=True):
    """Stages what a relay has landed in lent memory, once it has given it back.

    Each block is held to its digest again. Answered by `Done`.
    """

    landed: Manifest
    """Of this rank, with the digests of what shall serve."""


class FinishStaging(msgspec.Struct, frozen=True, tag=True):
    """Adds what no source brings, and says what is staged. Answered by `UpdateStaged`.

    Fails with `CheckpointError` naming what has not come.
    """


class ProveStaged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Runs what is staged, eagerly, on all ranks together. Answered by `Proven`."""

    probe: bytes = b""
    """Recorded by the source, to be met; empty to record one."""
    prompts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Prompts, and the tokens that greedy decoding must answer with; none to ask only for
    finite numbers."""


class DropStaging(msgspec.Struct, frozen=True, tag=True):
    """Forgets what is staged, if anything is, and gives its memory back. Answered by `Done`."""


class ApplyUpdate(msgspec.Struct, frozen=True, tag=True):
    """Copies what is staged, and differs, into the arena, and verifies it: on the stream of steps.

    Answered by `Applied`. A rank that fails here has neither the old weights nor the new ones.
    """


class TrimMemory(msgspec.Struct, frozen=True, tag=True):
    """Has a device take back memory that its allocator does not use: on the stream of steps.

    Answered by `Trimmed`.
    """


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Which file was read, so that another one in its place is noticed."""

    name: str
    inode: int
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(name: str, status: os.stat_result) -> FileIdentity:
        """Returns what the status of a file says."""
        return FileIdentity(name, status.st_ino, status.st_size, status.st_mtime_ns)


class StagedFiles(msgspec.Struct, frozen=True, tag=True):
    """A folder was read, and every file was still the same at the end."""

    files: tuple[FileIdentity, ...]


class Lent(msgspec.Struct, frozen=True, tag=True):
    """Memory of the arena's layout, all zero; its descriptor travels with this message."""

    descriptors: int


class UpdateStaged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New weights are there, whole, beside those that serve."""

    manifest: Manifest
    """With their digests."""
    blocks_changed: int
    bytes_changed: int
    """Of blocks that differ from those that serve."""
    report: LoadReport
    extra_bytes: int
    """Memory that staging holds besides the arena: private pages, measured."""
    notes: tuple[str, ...] = ()
    """Rules that were applied and that whoever updates should know, in words."""


class Proven(msgspec.Struct, frozen=True, tag=True):
    """What is staged computes what it should."""

    probe: bytes
    """Recorded, or the one that was met."""


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The new weights lie in the arena, verified."""

    bytes_copied: int
    seconds_copied: float


class Trimmed(msgspec.Struct, frozen=True, tag=True):
    """Bytes that the allocator of the rank's device had reserved; both 0 on the CPU."""

    bytes_before: int
    bytes_after: int


StagingCommand = (
    OpenStaging | StageDisk | StageHeaders | StagePiece | LendStaging | StageLent | FinishStaging
    | ProveStaged | DropStaging
)  # fmt: skip
StagingReply = StagedFiles | Lent | UpdateStaged | Proven
