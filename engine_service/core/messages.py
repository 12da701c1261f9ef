"""Messages between the front and one rank worker, as one ordered stream.

The front sends a command, the worker answers it with one reply (or `Failed`);
`Progress` may come before the reply. Commands are answered in their order, so
whatever the front sends between two steps falls between them on every rank.
"""

from __future__ import annotations

import msgspec

from engine_service.core.check_messages import CheckCommand, CheckReply
from engine_service.core.expert_map import ExpertMap
from engine_service.core.expert_messages import ExpertCommand, ExpertReply
from engine_service.core.load_report import LoadReport
from engine_service.core.member_messages import MemberCommand, MemberReply
from engine_service.core.rank_config import RankConfig
from engine_service.core.step_messages import Sampled, Step
from engine_service.core.update_messages import (
    Applied,
    ApplyUpdate,
    StagingCommand,
    StagingReply,
    Trimmed,
    TrimMemory,
)
from relay_service.core.manifest import Manifest


class Start(msgspec.Struct, frozen=True, tag=True):
    """Allocates a model's arena, all zero. Answered by `Allocated`.

    Weights may land in it at once: a rank that is alone builds the model for its next
    command, several do so before they answer.
    """

    config: RankConfig
    files: dict[str, bytes]
    """`config.json` and its companions, by name."""


class LoadDisk(msgspec.Struct, frozen=True, tag=True):
    """Fills the arena from a checkpoint folder. Answered by `Loaded`."""

    folder: str
    narrow: bool = True
    """Whether tensors may lose bits in the arena's type: it was asked for by name."""
    bytes_per_second: int = 0
    """Most bytes to read in a second; 0 for no limit."""


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Copies what matches of a former arena, whose descriptor comes along. Answered by `Restored`.

    What does not match its digest is zero afterwards.
    """

    manifest: Manifest
    """With the digests that the former arena shall have."""


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Audits what a pass reads, and captures the decode graph. Answered by `Captured`."""


class CutOff(msgspec.Struct, frozen=True, tag=True):
    """Moves the arena to fresh memory at the same address. Answered by `Moved`.

    For a relay that did not say that it gave up writing: what it still maps is no
    longer what serves.
    """


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Takes the landed weights: seals the arena, so that nobody else can write.

    Answered by `Done`. By then the relay has returned its mapping, or was cut off.
    """


class RecordProbe(msgspec.Struct, frozen=True, tag=True):
    """Runs the greedy probe and records it. Answered by `Recorded`."""


class CheckProbe(msgspec.Struct, frozen=True, tag=True):
    """Runs a recorded probe, eager and replayed, and compares. Answered by `Done`."""

    probe: bytes
    steps: int | None = None
    """Only so many of its first steps; by default all."""


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """The arena exists; its descriptors travel with this message."""

    manifest: Manifest
    """Without digests."""
    facts: tuple[tuple[str, str], ...]
    """Format facts of this rank's model and kernel format."""
    max_positions: int
    """Tokens that a context can have at most."""
    address: int
    page_kind: str
    descriptors: int
    experts: ExpertMap | None = None
    """Where the experts of all ranks lie; none for a model without."""


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The arena holds what matched of a former one."""

    found_blocks: int
    """Those that matched where they lie now."""
    blocks: int
    """Of the whole arena."""


class Captured(msgspec.Struct, frozen=True, tag=True):
    """The graphs are captured. Times are of the host's monotonic clock, in seconds."""

    imported_at: float
    """When the rank had imported what it needs."""
    built_at: float
    """When the model was built and the ranks had met."""
    compiled: bool = False
    """Whether the decode layer is one that was compiled ahead of time."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The arena holds the checkpoint and is sealed."""

    manifest: Manifest
    """With digests, computed while loading."""
    report: LoadReport


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The arena lies in fresh memory, whose descriptor travels with this message."""

    manifest: Manifest
    """With digests of the fresh memory: a write that raced with the move shows."""


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """A recorded probe."""

    probe: bytes


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far a long command is."""

    bytes_done: int
    bytes_total: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command is done."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command failed; `kind` names a class of `engine_service.errors`."""

    kind: str
    message: str
    details: dict[str, str]


Command = (
    Start | LoadDisk | Restore | Capture | Step | CutOff | Commit | RecordProbe | CheckProbe
    | TrimMemory | ExpertCommand | MemberCommand | StagingCommand | ApplyUpdate | CheckCommand
)  # fmt: skip
Reply = (
    Allocated | Restored | Captured | Loaded | Moved | Sampled | Recorded | Progress | Done | Failed
    | Trimmed | ExpertReply | MemberReply | StagingReply | Applied | CheckReply
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_staging = msgspec.msgpack.Decoder(StagingCommand)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    """Encodes a message."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Decodes a command; raises `msgspec.ValidationError` for anything else."""
    return _commands.decode(frame)


def decode_staging(frame: bytes) -> StagingCommand:
    """Decodes a command that stages weights; raises `msgspec.ValidationError` for another one."""
    return _staging.decode(frame)


def decode_reply(frame: bytes) -> Reply:
    """Decodes a reply; raises `msgspec.ValidationError` for anything else."""
    return _replies.decode(frame)
