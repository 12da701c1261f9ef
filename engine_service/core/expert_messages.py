"""Messages between the front and a rank that move experts; see `messages`."""

from __future__ import annotations

import msgspec

from engine_service.core.expert_map import Slots
from relay_service.core.manifest import Unit


class StageExperts(msgspec.Struct, frozen=True, tag=True):
    """Fetches what a layer's slots shall hold beside the arena, and checks it.

    All ranks exchange experts; what serves stays as it is. Answered by `Staged`.
    """

    layer: int
    slots: Slots
    digests: dict[int, tuple[bytes, ...]]
    """Of the blocks of each expert that this rank gets."""


class MoveExperts(msgspec.Struct, frozen=True, tag=True):
    """Copies what is staged into its slots, and follows it. Answered by `ExpertsMoved`."""


class DropExperts(msgspec.Struct, frozen=True, tag=True):
    """Forgets what is staged, if anything is. Answered by `Done`."""


class Staged(msgspec.Struct, frozen=True, tag=True):
    """What a layer's slots shall hold is there, and right."""

    bytes_received: int
    """From other ranks."""


class ExpertsMoved(msgspec.Struct, frozen=True, tag=True):
    """The experts of a layer lie where they were staged for."""

    units: tuple[Unit, ...]
    """Of the layer, without digests: they are called after the experts that they hold now."""


ExpertCommand = StageExperts | MoveExperts | DropExperts
ExpertReply = Staged | ExpertsMoved
