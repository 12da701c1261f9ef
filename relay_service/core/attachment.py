"""What an engine and the relay of its host say on the attachment socket. Plain Python.

The engine sends `Attach` with the descriptors of each rank's arena, then an `Update`
whenever its state or weights change, and `Lend` with those of memory in which new weights
shall land while it serves. Before a commit it says `Closing`, to hear who reads what will
be replaced. The relay answers each at once: `Closing` with `Reading`, the others with
`Accepted`; `Denied` where it refuses. The end of the stream detaches; a `Lend` that is denied
does not end it. An engine that asks for the arena of its former life says `Reclaim` first, on
a connection of its own; see `reclaiming`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.layout import check
from relay_service.core.manifest import Manifest
from relay_service.core.reclaiming import (
    MAX_KEEP_SECONDS,
    HandedBack,
    Kept,
    LetGo,
    Reclaim,
    Take,
)
from relay_service.errors import InvalidRequest, Refused

ARTIFACT_NAMES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
)
"""Files that travel; nothing else is taken from a peer, and none is used as a path."""

MAX_ARTIFACT_BYTES = 64 << 20

PerRank = Annotated[int, msgspec.Meta(ge=1, le=2)]
KeepSeconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_KEEP_SECONDS)]


class Attach(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Attaches one life of an instance. Its arenas' descriptors come along, in rank order."""

    instance: str
    generation: str
    model: str
    state: State
    format: Format
    placement: Placement
    weights: Weights
    manifests: tuple[Manifest, ...]
    artifacts: dict[str, bytes]
    probe: bytes = b""
    descriptors_per_rank: PerRank = 1
    """1 for an arena in host memory; 2 for one on a device, its header first."""
    touched: bool = False
    """Whether bytes may lie in the arenas of a dummy already, which another relay has landed."""
    keep_seconds: KeepSeconds = 0.0
    """How long the arenas shall stay, on the host, for the next life; see `reclaiming`."""
    started_as: str = ""
    """What the operator asked for: only a life that was asked for the same takes them."""


class Update(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Says how the instance changed."""

    state: State
    weights: Weights
    model: str = ""
    """Empty when it's called as before."""
    placement: Placement | None = None
    """None when its ranks lie as before."""
    manifests: tuple[Manifest, ...] = ()
    """Empty when they are as before."""
    probe: bytes = b""
    artifacts: dict[str, bytes] | None = None
    """None when they are as before."""


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Lends memory for one pull, shaped like the arenas; its descriptors come along, by rank.

    On the host it may be sparse: what the relay writes it allocates first. It is given back
    by `ReturnMapping`, and by a pull that fails.
    """

    descriptors_per_rank: PerRank = 1
    """As in `Attach`; a device's arenas may have memory of the host lent beside them."""


class Closing(msgspec.Struct, frozen=True, tag=True):
    """Says that other weights will serve soon: from now on nobody begins to read these.

    Whoever holds a lease may read on. The next `Update` ends it, whatever that says.
    """

    version: str
    """Of the weights that come."""
    ends_leases: bool = False
    """Whether the leases of those who still read end now."""


class Reading(msgspec.Struct, frozen=True, tag=True):
    """Answers `Closing`: who held a lease when it came."""

    holders: tuple[str, ...]
    """Names of the instances that read, one for each lease."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The relay took the message."""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """The relay refused the message, and closes the socket unless that was `Lend`."""

    reason: str


ToRelay = Attach | Update | Lend | Closing | Reclaim | Take | LetGo
"""What an engine says."""
Answer = Accepted | Denied | Reading
"""What a relay answers to one that is attached, or attaches."""
ToEngine = Accepted | Denied | Reading | Kept | HandedBack
"""What a relay answers; the last two only to `Reclaim`."""


_encoder = msgspec.msgpack.Encoder()
_to_relay = msgspec.msgpack.Decoder(ToRelay)
_to_engine = msgspec.msgpack.Decoder(Answer)
_kept = msgspec.msgpack.Decoder(ToEngine)


def encode(message: ToRelay | ToEngine) -> bytes:
    """Encodes a message."""
    return _encoder.encode(message)


def decode_to_relay(frame: bytes) -> ToRelay:
    """Decodes what an engine sent; raises `msgspec.MsgspecError`."""
    try:
        return _to_relay.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def decode_to_engine(frame: bytes) -> Answer:
    """Decodes what a relay sent; raises `msgspec.MsgspecError`."""
    try:
        return _to_engine.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def decode_kept(frame: bytes) -> ToEngine:
    """Decodes what a relay said about a kept arena; raises `msgspec.MsgspecError`."""
    try:
        return _kept.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def check_attach(attach: Attach, descriptors: int) -> None:
    """Raises `InvalidRequest` or `ManifestError` for an attachment that contradicts itself."""
    expected = len(attach.manifests) * attach.descriptors_per_rank
    if descriptors != expected or not attach.manifests:
        raise InvalidRequest(f"{len(attach.manifests)} ranks, {descriptors} descriptors")
    for rank, manifest in enumerate(attach.manifests):
        if manifest.rank != rank:
            raise InvalidRequest(f"manifest of rank {manifest.rank} stands at {rank}")
        check(manifest)


def check_same_arenas(old: Sequence[Manifest], new: Sequence[Manifest], *, moved: bool) -> None:
    """Raises `Refused`, `ManifestError` or `InvalidRequest` unless `new` are the arenas of `old`.

    Where experts have moved, only the extents are the same.
    """
    if len(new) != len(old):
        raise InvalidRequest(f"{len(new)} manifests for {len(old)} ranks")
    for before, after in zip(old, new, strict=True):
        check(after)
        compared = before.extent_difference if moved else before.layout_difference
        if difference := compared(after):
            raise Refused(f"the arena has changed: {difference}")


def by_sha256(artifacts: dict[str, bytes]) -> dict[str, tuple[str, bytes]]:
    """Returns names and contents by digest. Raises `InvalidRequest` for what does not travel."""
    for name, data in artifacts.items():
        if name not in ARTIFACT_NAMES or len(data) > MAX_ARTIFACT_BYTES:
            raise InvalidRequest(f"artifact {name[:64]!r} is not one that travels")
    return {hashlib.sha256(data).hexdigest(): (name, data) for name, data in artifacts.items()}
