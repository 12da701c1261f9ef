"""What an engine and the relay of its host say on the attachment socket. Plain Python.

The engine sends `Attach` with the descriptors of each rank's arena, then an `Update`
whenever its state or weights change. The relay answers each with `Accepted` or
`Denied`. The end of the stream detaches.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest

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
    descriptors_per_rank: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    """1 for an arena in host memory; 2 for one on a device, its header first."""


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


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The relay took the message."""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """The relay refused the message and closes the socket."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_to_relay = msgspec.msgpack.Decoder(Attach | Update)
_to_engine = msgspec.msgpack.Decoder(Accepted | Denied)


def encode(message: Attach | Update | Accepted | Denied) -> bytes:
    """Encodes a message."""
    return _encoder.encode(message)


def decode_to_relay(frame: bytes) -> Attach | Update:
    """Decodes what an engine sent; raises `msgspec.MsgspecError`."""
    try:
        return _to_relay.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def decode_to_engine(frame: bytes) -> Accepted | Denied:
    """Decodes what a relay sent; raises `msgspec.MsgspecError`."""
    try:
        return _to_engine.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
