"""Arenas that are kept → messages."""

from __future__ import annotations

from datetime import timedelta

from relay_service.core.kept import KeptArenas
from seedrelay.v1 import relay_pb2


def kept_to_proto(arenas: KeptArenas) -> list[relay_pb2.KeptArena]:
    """Describes every arena that is kept now."""
    messages = []
    for kept in arenas:
        weights = kept.holding.weights
        message = relay_pb2.KeptArena(
            instance=kept.holding.name, weight_version=weights.version,
            weights_digest=weights.digest, arena_bytes=kept.arena_bytes,
        )  # fmt: skip
        message.expiry.FromTimedelta(timedelta(seconds=arenas.seconds_left(kept)))
        messages.append(message)
    return messages
