"""What serves while new weights land beside it. Plain Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from relay_service.core.manifest import Manifest
from relay_service.core.ports import Arena


@dataclass(frozen=True)
class Beside:
    """One rank's arena, whose verified blocks need not land once more."""

    manifest: Manifest
    lend: Callable[[], AbstractContextManager[Arena]]
    """Lends the arena for one read. Raises `EpochChanged` once other weights serve."""

    def read(self, index: int) -> bytes:
        """Returns the bytes of a block. Raises `EpochChanged`."""
        block = self.manifest.block(index)
        with self.lend() as arena:
            return bytes(arena.view(block.offset, block.nbytes))
