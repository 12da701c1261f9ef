"""Arenas that a relay keeps → the JSON objects of the command line."""

from __future__ import annotations

from typing import Any

from seedrelay.v1 import relay_pb2


def arena(kept: relay_pb2.KeptArena) -> dict[str, Any]:
    """Returns what is kept of an instance that has ended."""
    return {
        "instance": kept.instance,
        "weight_version": kept.weight_version,
        "weights_digest": kept.weights_digest,
        "arena_bytes": kept.arena_bytes,
        "seconds_left": kept.expiry.ToTimedelta().total_seconds(),
    }
