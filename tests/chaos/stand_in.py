"""An engine without torch: the engine service's own start, fill and commit over a bare arena."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.transport_peers import new_arena
from engine_service.config import EngineConfig
from engine_service.core.blocks import BlockPool
from engine_service.core.bring_up import BringUp
from engine_service.core.engine import Engine
from engine_service.core.instance import Identity, Instance
from engine_service.core.messages import Allocated, CheckProbe, Command, Commit
from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.core.ports import FillProgress
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.update_readers import closed_to_readers
from engine_service.core.update_request import PushSource, WeightUpdate
from engine_service.core.update_sources import Watched
from engine_service.errors import ProbeMismatch
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import BLOCK_BYTES, Manifest, weights_digest
from relay_service.memory.host import HostArena, seal
from tests.chaos import truth
from tests.chaos.plan import Plan

MODEL = "chaos"
LEASE_WAIT_SECONDS = 0.5
Tell = Callable[[dict[str, Any]], None]
"""Tells the run something: how far a fill is, or what the instance claims to be."""


class BareRank:
    """One rank without a process: it holds an arena and computes nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        fd, self.arena = new_arena(name, truth.LAYOUT)
        self.workers: list[Any] = []
        self.descriptors = [[fd]]
        facts = (("model", MODEL),)
        self.arenas = [Allocated(truth.LAYOUT, facts, 1, self.arena.address, "4 KiB", 1)]

    @property
    def fd(self) -> int:
        """Descriptor of the arena as it is now."""
        return self.descriptors[0][0]

    async def same(self, command: Command, kind: type) -> list[None]:
        """Does what a rank does of a commit and a probe."""
        if isinstance(command, Commit):
            seal(self.fd)
        elif isinstance(command, CheckProbe) and command.probe not in map(
            truth.probe, truth.VERSIONS
        ):
            raise ProbeMismatch(f"{command.probe!r} does not come out")
        return [None]

    async def cut_off(self) -> list[Manifest]:
        """Moves the arena to fresh memory at its address, and digests what lies there."""
        held = bytes(self.arena.view(0, self.arena.data_bytes))
        fd, fresh = new_arena(self._name, truth.LAYOUT)
        fresh.land(0, held)
        fresh.close()
        self.arena = HostArena(fd, len(held), writable=True, address=self.arena.base)
        os.close(self.fd)
        self.descriptors = [[fd]]
        return [truth.verified(bytes(self.arena.view(0, len(held))))]

    async def trim_memory(self, _seconds: float = 0.0) -> tuple[int, int]:
        """Has no memory to trim."""
        return 0, 0

    async def stop(self) -> None:
        """Has no process to end."""


class StandIn(Instance):
    """An instance that tells the run what it tells its relay, and before."""

    def __init__(self, config: EngineConfig, tell: Tell) -> None:
        self.bare = BareRank(config.instance_name)
        engine = Engine(Scheduler(Limits(16, 1, 1, 16), BlockPool(1, 16)), self.bare)
        identity = Identity(config.instance_name, uuid.uuid4().hex, MODEL)
        super().__init__(config, identity, self.bare, engine, GrpcRelayLink)
        self._tell = tell

    async def allocate(self, files: dict[str, bytes]) -> None:
        """Takes the arena, which is there."""
        self.files, self.manifests = files, [truth.LAYOUT]

    async def capture(self) -> None:
        """Has nothing to capture."""

    async def tell_relay(self) -> None:
        """Tells the run first: nobody may believe what it cannot hold against us."""
        done, now = self.fill_report, self.engine.weights
        claim = {
            "state": self.lifecycle.state, "reason": self.lifecycle.reason, "at": time.monotonic(),
            "version": now.version, "digest": now.digest, "fd": self.bare.fd, "probe": self.probe,
        }  # fmt: skip
        if done:
            steps = [(s.source_instance, s.transport, s.reason) for s in done.path]
            claim |= {"path": steps, "reread": done.bytes_reread, "moved": done.bytes_moved}
        self._tell(claim)
        await super().tell_relay()

    async def seed(self, plan: Plan) -> None:
        """Serves the first version, as if it had read it from disk."""
        self.lifecycle.to(State.LOADING)
        await self.allocate({})
        self._write(truth.contents(plan, "v1"))
        seal(self.bare.fd)
        await self.attach(self.config.relay)
        await self._serve("v1", 1)

    async def update(self, plan: Plan) -> None:
        """Commits the second version in place, as ranks do between two steps.

        Of every other plan its readers are waited for, for a moment.
        """
        wanted = WeightUpdate(
            version="v2", source=PushSource(), pause=PauseRequest(PauseMode.RETRACT),
            lease_wait_seconds=LEASE_WAIT_SECONDS if plan.seed % 2 else 0.0,
        )  # fmt: skip
        async with closed_to_readers(self, wanted, Watched()):
            await self._commit(plan)

    async def _commit(self, plan: Plan) -> None:
        self.lifecycle.to(State.UPDATING)
        await self.tell_relay()
        self.bare.arena.sequence += 1
        self._write(truth.contents(plan, "v2"))
        self.bare.arena.sequence += 1
        await self._serve("v2", self.engine.weights.epoch + 1)

    def flip(self, block: int) -> None:
        """Changes a bit in a block, and tells nobody."""
        self.bare.arena.view(block * BLOCK_BYTES, 1)[0] ^= 1

    async def _serve(self, version: str, epoch: int) -> None:
        self.probe = truth.probe(version)
        await self.serve(Weights(version, weights_digest(self.manifests), epoch))

    def _write(self, data: bytes) -> None:
        self.bare.arena.land(0, data)
        self.manifests = [truth.verified(data)]


class ToldBringUp(BringUp):
    """The start of a target, which tells the run how far it is."""

    def __init__(self, instance: StandIn, filler: Any, tell: Tell) -> None:
        super().__init__(instance, filler)
        self._tell = tell

    def _note(self, progress: FillProgress) -> None:
        super()._note(progress)
        if progress.bytes_total:
            self._tell({"percent": 100 * progress.bytes_verified // progress.bytes_total})


def config(
    name: str, relay: str, folder: Path, transport: str, deadline_seconds: float
) -> EngineConfig:
    """Returns the settings of a dummy that fills itself."""
    return EngineConfig(
        model=str(folder), listen="127.0.0.1:0", load_format="dummy", relay=relay,
        instance_name=name, transport=transport, deadline_seconds=deadline_seconds,
    )  # fmt: skip
