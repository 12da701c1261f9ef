"""Memory that an engine lends beside its arenas: new weights land there while it serves.

Plain Python. It is lent for one pull. What lands in it is never announced, and nobody reads it
here: the engine copies out of it, and holds each block to its digest again. Only blocks that
differ from what serves land, so of the memory of a small change little is ever allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from relay_service.core.arenas import close_arenas, map_arenas
from relay_service.core.beside import Beside
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.ports import Arena, MapArena
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.errors import WrongState


class Lent:
    """Lent memory of all ranks. Owns its descriptors and mappings."""

    def __init__(
        self,
        descriptors: list[int],
        serves: Sequence[Manifest],
        map_arena: MapArena,
        read_beside: Callable[[int], AbstractContextManager[Arena]],
    ) -> None:
        """Takes the descriptors over, also when it raises.

        `serves` describes the arenas that it is lent beside, and `read_beside` lends the one of
        a rank for one read. Raises what mapping it does.
        """
        self._descriptors = descriptors
        self._arenas: list[Arena] = []
        self.serves = weights_digest(list(serves))
        """Digest of what served when it was lent."""
        self.landed = Landed()
        self.manifests: list[Manifest] = []
        """Of what has landed, once all of it has."""
        self._opened = False
        try:
            self._arenas = map_arenas(map_arena, descriptors, serves, writable=True, sparse=True)
        except BaseException:
            self.close()
            raise
        self._receivers = [
            Receiver(
                manifest.without_digests(), arena,
                beside=Beside(manifest, partial(read_beside, manifest.rank)),
            )
            for manifest, arena in zip(serves, self._arenas, strict=True)
        ]  # fmt: skip

    @property
    def filling(self) -> bool:
        """Whether a pull has begun that isn't complete."""
        return self._opened and not self.manifests

    def open_receivers(self) -> list[Receiver]:
        """Returns the receivers, one per rank, once. Raises `WrongState`."""
        if self._opened:
            raise WrongState("the lent memory is being filled already, or was")
        self._opened = True
        return self._receivers

    def keep(self, manifests: list[Manifest]) -> None:
        """Takes note of what a pull has landed; the engine asks before it takes it over."""
        self.manifests = manifests

    def close(self) -> int:
        """Unmaps it and closes its descriptors; returns how many arenas were mapped."""
        count = close_arenas(self._arenas)
        while self._descriptors:
            os.close(self._descriptors.pop())
        return count
