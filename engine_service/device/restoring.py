"""Copies out of the arena of a rank's former life what is still right. Free of torch."""

from __future__ import annotations

from collections.abc import Callable

from engine_service.core import messages
from engine_service.device.plan import Plan
from engine_service.errors import WrongState
from relay_service.core.manifest import Manifest
from relay_service.memory.host import HostArena, is_sealed


def restore(
    planned: Plan, fd: int, manifest: Manifest, progress: Callable[[int, int], None]
) -> messages.Restored:
    """Fills the arena from another one that lies alike, block by block.

    What counts is the digest of what has landed here, where nobody else writes; a block with
    another one is zero again. Raises `WrongState` for an arena that serves or lies otherwise,
    and `relay_service.errors.ManifestError` for memory that is none of its size.
    """
    memory = planned.memory
    if memory is None or is_sealed(memory.fd):
        raise WrongState("only a fresh arena in host memory is restored")
    if difference := planned.manifest.layout_difference(manifest):
        raise WrongState(f"the former arena lies otherwise: {difference}")
    former = HostArena(fd, manifest.data_bytes, writable=False)
    found = done = 0
    try:
        former.check_header()
        for index in range(manifest.block_count):
            block = manifest.block(index)
            landed = memory.mapping.land(block.offset, former.view(block.offset, block.nbytes))
            if landed == manifest.block_digest(index):
                found += 1
            else:
                memory.mapping.land(block.offset, bytes(block.nbytes))
            done += block.nbytes
            progress(done, manifest.weight_bytes)
    finally:
        former.close()
    return messages.Restored(found, manifest.block_count)
