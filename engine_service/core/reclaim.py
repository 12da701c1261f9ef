"""Serves again what an instance's former life held, out of the memory that its relay kept.

    kept? → allocate → handed back → copied, each block digested → probe → READY

The memory of the former life is sealed, and a seal is for good: nobody can map it for writing
again, nor give part of it back. So the blocks are copied into a fresh arena, and count for what
they are there. Whatever does not match is zero again, and the instance starts as it would have.
Plain Python.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

from engine_service.core.instance import Instance
from engine_service.core.messages import CheckProbe, Commit, Done
from engine_service.core.model_files import read_folder
from engine_service.core.ports import KeptArena
from engine_service.errors import (
    ConfigError,
    ProbeMismatch,
    RelayUnreachable,
    WrongState,
)
from relay_service.core.instance import State, verified_digest
from relay_service.core.reclaiming import HandedBack
from relay_service.memory.host import available_bytes

_log = logging.getLogger(__name__)


class Reclaimer:
    """One attempt of one start."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    async def run(self) -> bool:
        """Returns whether the instance serves what was kept for it; if not, it may be started.

        Then arenas may be allocated, and hold the blocks that matched. Raises `RankDied`, and
        what allocating does.
        """
        config = self._instance.config
        if not config.keep_arena_seconds:
            return False
        kept = None
        try:
            with self._instance.phases.measure("reclaim"):
                link = self._instance.link_to(config.relay)
                kept = await link.kept(config.name, config.started_as)
                return kept is not None and await self._serve(kept)
        except (RelayUnreachable, ConfigError, WrongState, ProbeMismatch) as error:
            _log.warning("what the relay may have kept is not served: %s", error)
            return False
        finally:
            if kept:
                kept.close()

    async def _serve(self, kept: KeptArena) -> bool:
        instance = self._instance
        if available_bytes() < kept.arena_bytes:
            _log.warning("no memory to copy %d bytes that the relay kept", kept.arena_bytes)
            await kept.let_go()
            return False
        await instance.allocate(self._files(kept))
        if instance.format is None:
            return False
        handed, descriptors = await kept.take(
            instance.format, instance.placement, instance.manifests
        )
        try:
            if not await self._copied(handed, descriptors):
                return False
        finally:
            for fd in descriptors:
                os.close(fd)
        await self._commit(kept, handed)
        return True

    def _files(self, kept: KeptArena) -> dict[str, bytes]:
        """Returns the kept files: an update may have brought them. Not those of another model."""
        folder = Path(self._instance.config.model)
        own = read_folder(folder) if folder.is_dir() else {}
        config = kept.files.get("config.json")
        return kept.files if own.get("config.json", config) == config else own

    async def _copied(self, handed: HandedBack, descriptors: list[int]) -> bool:
        instance = self._instance
        # Else it was being filled: a source has to say what shall lie there.
        served = verified_digest(list(handed.manifests), handed.weights.digest) and handed.probe
        instance.touched = True
        ranks = await instance.ranks.restore(handed.manifests, descriptors)
        found, blocks = sum(r.found_blocks for r in ranks), sum(r.blocks for r in ranks)
        _log.info("%d of %d blocks that the relay kept match their digests", found, blocks)
        return bool(served) and found == blocks

    async def _commit(self, kept: KeptArena, handed: HandedBack) -> None:
        instance = self._instance
        await instance.capture()
        # First: a sealed arena could not be filled otherwise any more. No relay maps this one.
        await instance.ranks.same(CheckProbe(handed.probe), Done)
        await instance.ranks.same(Commit(), Done)
        instance.manifests, instance.probe = list(handed.manifests), handed.probe
        instance.identity = dataclasses.replace(instance.identity, model=kept.model)
        instance.reclaimed = True
        instance.lifecycle.to(State.LOADING)
        await instance.serve(handed.weights)
