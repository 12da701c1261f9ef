"""What an engine that was started again says to have back the arena of its former life.

On a connection of its own to the attachment socket it sends `Reclaim`, which is answered by
`Kept`, then `Take`, answered by `HandedBack` with the descriptors of each rank's arena, or
`LetGo`, answered by `Accepted`. The relay may answer each with `Denied`. Plain Python.
"""

from __future__ import annotations

import msgspec

from relay_service.core.format import Format, Placement
from relay_service.core.instance import Weights
from relay_service.core.manifest import Manifest

MAX_KEEP_SECONDS = 3600.0
"""Longest time that an arena is kept."""


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Asks whether an arena is kept for an instance, which was started as it was before."""

    instance: str
    started_as: str
    """What the operator asked for; see `Attach`."""


class Take(msgspec.Struct, frozen=True, tag=True):
    """Takes what is kept into an arena of this kind."""

    format: Format
    placement: Placement
    manifests: tuple[Manifest, ...]


class LetGo(msgspec.Struct, frozen=True, tag=True):
    """Has the memory given back: nobody will take it."""


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Something is kept."""

    model: str
    """What its weights are called."""
    arena_bytes: int
    """Of all ranks."""
    artifacts: dict[str, bytes]


class HandedBack(msgspec.Struct, frozen=True, tag=True):
    """What was kept, as the former life described it last. It lies here no longer.

    The bytes may be others: a commit may have been cut short. Each block counts only for what
    its digest says; of a dummy that was being filled, empty digests stand for what had not come.
    """

    weights: Weights
    manifests: tuple[Manifest, ...]
    probe: bytes
