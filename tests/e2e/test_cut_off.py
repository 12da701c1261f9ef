"""A relay that never says that it gave up writing cannot change the weights that serve."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine_service.config import EngineConfig
from engine_service.core.blocks import BlockPool
from engine_service.core.bring_up import BringUp
from engine_service.core.engine import Engine
from engine_service.core.fill import Filler
from engine_service.core.instance import Identity, Instance
from engine_service.core.ports import FillReport, OnProgress
from engine_service.core.ranks import RankGroup
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Row, Sampling
from engine_service.errors import ArenaError
from relay_service.core.attachment import Attach
from relay_service.core.instance import Instance as Announced
from relay_service.core.instance import State
from relay_service.core.manifest import HEADER_BYTES, Manifest
from relay_service.core.pull_report import PullOptions
from relay_service.memory.host import HostArena

ROWS = (Row((1, 2, 3), 0, (0,), 0, Sampling()),)


@dataclass
class SilentRelay:
    """Copies a seed's arena into the target's, and keeps its mapping for later."""

    seed: Instance
    address: str = "silent"
    writes_while_cut_off: bool = False
    mapping: HostArena | None = None
    detached: list[bool] = field(default_factory=list)

    async def offers(self) -> list[Announced]:
        """Offers nothing."""
        return []

    async def fetch(self, instance: Announced) -> dict[str, bytes]:
        """Has nothing."""
        return {}

    async def attach(
        self, describe: Callable[[], Attach], descriptors: Callable[[], list[int]]
    ) -> None:
        """Maps the target's arena for writing, as a relay does."""
        size = describe().manifests[0].data_bytes
        self.mapping = HostArena(descriptors()[0], size, writable=True)

    async def update(self) -> None:
        """Hears it."""

    async def pull(self, options: PullOptions, on_progress: OnProgress) -> FillReport:
        """Lands every byte of the seed."""
        size = self.seed.manifests[0].data_bytes
        source = HostArena(self.seed.ranks.descriptors[0][0], size, writable=False)
        ctypes.memmove(self.mapping.address, source.address, size)
        source.close()
        if self.writes_while_cut_off:
            self.scribble()
        weights = self.seed.engine.weights
        return FillReport(
            weight_version=weights.version, weights_digest=weights.digest, probe=self.seed.probe
        )

    async def return_mapping(self) -> bool:
        """Never says so."""
        return False

    def detach(self) -> None:
        """Notes it."""
        self.detached.append(True)

    async def manifests(self, ranks: int) -> list[Manifest]:
        """Says what it believes to have landed."""
        return self.seed.manifests

    async def close(self) -> None:
        """Lets go."""
        self.mapping.close()

    def scribble(self) -> None:
        """Writes garbage all over what it still maps."""
        ctypes.memset(self.mapping.base + HEADER_BYTES, 0x5A, self.mapping.data_bytes)


async def _start(model: Path, load_format: str, relay: SilentRelay | None = None) -> Instance:
    config = EngineConfig(
        model=str(model), listen="127.0.0.1:0", load_format=load_format, threads=1,
        kv_cache_tokens=256, weight_version="v5",
    )  # fmt: skip
    ranks = await RankGroup.spawn(1, 1)
    scheduler = Scheduler(Limits(256, 8, 8, 16), BlockPool(16, 16))
    identity = Identity(load_format, load_format, model.name)
    instance = Instance(config, identity, ranks, Engine(scheduler, ranks), lambda _: relay)
    await BringUp(instance, Filler(instance)).run()
    return instance


@pytest.fixture
async def seed(model: Path) -> AsyncIterator[Instance]:
    """An instance that serves from disk."""
    instance = await _start(model, "disk")
    yield instance
    await instance.close()


async def test_late_writes_do_not_reach_serving_weights(seed: Instance, model: Path) -> None:
    """Garbage written through the mapping that a relay kept changes neither tokens nor address."""
    relay = SilentRelay(seed)
    target = await _start(model, "dummy", relay)
    address = target.ranks.arenas[0].address
    await Filler(target).fill("silent", PullOptions(), lambda _: None)
    assert target.lifecycle.state is State.READY
    expected = await seed.ranks.step(ROWS)
    relay.scribble()
    assert await target.ranks.step(ROWS) == expected
    assert [m.digest for m in await target.ranks.cut_off()] == [seed.manifests[0].digest]
    assert target.ranks.arenas[0].address == address
    assert relay.detached == [True]
    await target.close()


async def test_a_write_before_the_cut_is_found(seed: Instance, model: Path) -> None:
    """Weights that were changed before the relay was cut off never serve: the instance fails."""
    relay = SilentRelay(seed, writes_while_cut_off=True)
    target = await _start(model, "dummy", relay)
    with pytest.raises(ArenaError, match="changed while the relay was cut off"):
        await Filler(target).fill("silent", PullOptions(), lambda _: None)
    assert target.lifecycle.state is State.FAILED
    await target.close()


async def test_memory_that_cannot_be_cut_off_never_serves(
    seed: Instance, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device no mapping can be taken away: the instance fails instead of serving."""
    target = await _start(model, "dummy", SilentRelay(seed))

    async def refuses() -> list[Manifest]:
        raise ArenaError("memory on a device cannot be taken away")

    monkeypatch.setattr(target.ranks, "cut_off", refuses)
    with pytest.raises(ArenaError, match="cannot be taken away"):
        await Filler(target).fill("silent", PullOptions(), lambda _: None)
    assert target.lifecycle.state is State.FAILED
    await target.close()
