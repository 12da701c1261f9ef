"""Messages between the front and a rank when other ranks than before compute together.

First everybody meets anew (`Rejoin`), which may fail and changes no weights. Then each puts
its experts where the new map has them (`Place`), and captures. What slots shall hold is staged
before, from memory that the front passes on (`TakeUnits`). See `messages`.
"""

from __future__ import annotations

import msgspec

from engine_service.core.expert_map import ExpertMap
from relay_service.core.manifest import Manifest


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the rank still answers. Answered by `Done`, once its model is built."""


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Leaves the groups so far and meets the ranks that compute together from now on.

    All of them do so together; what is captured is void until `Capture`. Answered by `Done`,
    or `CollectiveFailed`, after which it may come again with another name.
    """

    name: str
    """Of the groups: another one at every decision."""
    rank: int
    """Of this rank among the members."""
    world_size: int


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A unit that a rank takes."""

    unit: str
    """What it is called where it comes from, and in the new map."""
    at: str
    """The unit in whose place it shall lie, as this rank calls it now; the same in a fresh rank."""
    digests: tuple[bytes, ...]
    """Of its blocks."""


class TakeUnits(msgspec.Struct, frozen=True, tag=True):
    """Copies units out of memory whose descriptor comes along, and checks each block.

    A rank whose arena is not sealed takes them into the arena; one that serves keeps them
    beside it, until `Place`, `DropExperts` or the next of the same place. Answered by `Taken`;
    on `ArenaError`, which names the unit, none of the command is kept.
    """

    manifest: Manifest
    """Of the memory, which has a header and is laid out like an arena."""
    wanted: tuple[Wanted, ...]


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The units are there, and right."""

    bytes_taken: int


class ReadUnits(msgspec.Struct, frozen=True, tag=True):
    """Reads units of a checkpoint folder into memory whose descriptor comes along.

    Nothing else of the folder is read. Answered by `UnitsRead`.
    """

    folder: str
    manifest: Manifest
    """Of the memory: units as this rank would hold them, without digests."""
    bytes_per_second: int = 0
    """Most bytes to read in a second; 0 for no limit."""


class UnitsRead(msgspec.Struct, frozen=True, tag=True):
    """The units are read."""

    manifest: Manifest
    """With the digests of what lies there."""


class Place(msgspec.Struct, frozen=True, tag=True):
    """Copies what was taken into its slots, and follows a new map in all layers.

    A fresh rank seals its arena. No rank waits for another one. Answered by `Placed`; an error
    ends the rank, since nobody knows what lies there.
    """

    experts: ExpertMap
    """Of all layers, with a row for each group that lives; some experts may be in none."""
    rank: int
    """Number of this rank."""
    routes: bool = False
    """Whether rows pass over experts that nobody holds, and choose among the others."""


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The experts lie as the map says."""

    manifest: Manifest
    """Without digests: units are called after what they hold now."""


MemberCommand = Beat | Rejoin | TakeUnits | ReadUnits | Place
MemberReply = Taken | UnitsRead | Placed
