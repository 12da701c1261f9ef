"""An engine of two ranks whose updates are disturbed, and who says what its weights should say."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from disturbing import ends, tell
from stage import READY, Stage, answer, eventually, reach, request, status_of

from clients.engine import EngineClient
from clients.errors import ClientError
from clients.relay import RelayClient
from engine_service.core.update_request import Phase
from seedrelay.v1 import engine_pb2

RATE = 1 << 20
"""Bytes per second of what shall take a few seconds."""
COLLECTIVE_SECONDS = 6
LEASE_SECONDS = 4
PROMPTS = 300
"""So many take a few seconds to prove."""
LIMIT_SECONDS = 60.0


class UpdateScene:
    """An engine that serves A, an instance behind another relay that serves B."""

    def __init__(self, stage: Stage, models: dict[str, Path]) -> None:
        self.stage, self.models = stage, models
        self.relay = stage.relay()
        self._far = ("--join", self.relay.address, "--egress-limit", str(RATE))
        self.far_relay = stage.relay(*self._far)
        self.source = stage.engine(
            models["b"], "--tp", "2", "--relay", self.far_relay.address, "--instance-name", "b"
        )
        self.engine = self._engine()
        self.says: dict[str, tuple[list[str], list[int]]] = {}
        """Digests by rank and greedy tokens of fresh processes, by model."""
        self._numbers = itertools.count(1)

    async def ready(self) -> None:
        """Waits for all."""
        for name, one in (("a", self.engine), ("b", self.source)):
            await reach(one)
            self.says[name] = await _says(one)
        self._serves("a", "v0")

    async def up(self) -> None:
        """Starts the engine anew where it has ended."""
        if self.engine.process.poll() is not None:
            self.engine = self._engine()
            await reach(self.engine)
            self._serves("a", "v0")

    async def again(self, generation: str) -> None:
        """Waits until the engine serves what it did at first, in another life."""

        async def serves() -> bool:
            try:
                status = await status_of(self.engine)
            except ClientError:
                return False
            return status.generation != generation and status.state == READY

        await eventually(serves, LIMIT_SECONDS)
        self._serves("a", "v0")

    @property
    def other(self) -> str:
        """The model that does not serve."""
        return "b" if self.serves == "a" else "a"

    async def ranks(self) -> list[int]:
        """Processes of the ranks."""
        return [rank.pid for rank in (await status_of(self.engine)).ranks]

    async def as_before(self) -> None:
        """The old weights serve, exactly, and a following update goes through."""
        await self.over()
        await self._holds()
        async with EngineClient(self.engine.address) as client:
            asked = self.asked(disk(self.models[self.other]))
            *_, last = [
                one async for one in client.update(engine_pb2.UpdateWeightsRequest(update=asked))
            ]
        await self.as_updated(last.report.weight_version)

    async def as_updated(self, version: str) -> None:
        """The other weights serve, exactly."""
        await self.over()
        self._serves(self.other, version)
        await self._holds()

    async def over(self) -> None:
        """Waits until nobody updates."""

        async def nobody() -> bool:
            return not (await status_of(self.engine)).HasField("update")

        await eventually(nobody, LIMIT_SECONDS)

    def asked(self, source: dict[str, Any], **changes: Any) -> engine_pb2.WeightUpdate:
        """Returns an update to the next version."""
        version = f"v{next(self._numbers)}"
        return engine_pb2.WeightUpdate(weight_version=version, source=source, **changes)

    async def until(self, phase: Phase, updater: subprocess.Popen[str]) -> None:
        """Waits until the update of a client is so far, and has staged something by then."""

        async def there() -> bool:
            assert updater.poll() is None, f"it has ended: {await ends(updater)}"
            update = (await status_of(self.engine)).update
            return update.phase == phase and (phase is not Phase.STAGING or update.bytes_done > 0)

        await eventually(there, LIMIT_SECONDS)

    @contextmanager
    def client(
        self, update: engine_pb2.WeightUpdate, pushes: str = "", seconds: float = LIMIT_SECONDS
    ) -> Iterator[subprocess.Popen[str]]:
        """Runs a client that updates; it is dead afterwards."""
        begin = engine_pb2.BeginWeightUpdateRequest(update=update)
        begin.lease.FromSeconds(LEASE_SECONDS)
        arguments = self.engine.address, begin.SerializeToString().hex(), pushes, str(seconds)
        with subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("updater.py")), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    @asynccontextmanager
    async def at(
        self, phase: Phase, seconds: float = LIMIT_SECONDS, **changes: Any
    ) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
        """Has a client bring an update to a phase, where it stays; yields it and the version.

        The client gives up where it isn't staged after so many seconds.
        """
        async with EngineClient(self.engine.address) as client:
            running = client.generate(request(max_tokens=1800))
            source = disk(self.models[self.other], RATE if phase is Phase.STAGING else 0)
            wanted = self.asked(source, pause_mode="PAUSE_MODE_WAIT", **changes)
            if phase is Phase.PROVING:
                for number in range(PROMPTS):
                    wanted.probe.add(prompt_token_ids=range(1 + number, 31 + number))
            if phase is Phase.PAUSING:
                await anext(running)
            with self.client(wanted, seconds=seconds) as updater:
                if phase in (Phase.PAUSING, Phase.COPYING):
                    await self.until(Phase.STAGED, updater)
                    if phase is Phase.COPYING:
                        os.kill((await self.ranks())[1], signal.SIGSTOP)
                    tell(updater)
                await self.until(phase, updater)
                yield updater, wanted.weight_version
            await running.aclose()

    async def restore_far(self) -> None:
        """Starts the far relay at its address, and waits until it has its instance again."""
        self.far_relay = self.stage.relay_again(self.far_relay, *self._far)

        async def listed() -> bool:
            async with RelayClient(self.relay.address) as client:
                known = (await client.status()).instances
            return any(one.instance == "b" and one.state == READY for one in known)

        await eventually(listed, LIMIT_SECONDS)

    def _engine(self):
        return self.stage.engine(
            self.models["a"], "--tp", "2", "--relay", self.relay.address, "--instance-name", "one",
            "--collective-timeout", str(COLLECTIVE_SECONDS), "--on-rank-death", "restart",
        )  # fmt: skip

    def _serves(self, name: str, version: str) -> None:
        self.serves, self.version = name, version

    async def _holds(self) -> None:
        status = await status_of(self.engine)
        assert (status.state, status.weight_version) == (READY, self.version), status.reason
        assert await _says(self.engine) == self.says[self.serves]


async def _says(engine) -> tuple[list[str], list[int]]:
    status = await status_of(engine)
    return [rank.digest for rank in status.ranks], await answer(engine, request(max_tokens=24))


def disk(folder: Path, rate: int = 0) -> dict[str, Any]:
    """Names a folder as the source."""
    return {"disk": {"folder": str(folder), "rate_limit_bytes_per_second": rate}}
