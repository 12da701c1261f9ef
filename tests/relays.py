"""Relays in this process, on ports that the system chooses, with engines without torch."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from fakes import FakeEngine, Memory, eventually, random_bytes, seam_layout

from clients.relay import RelayClient
from relay_service.app import Relay
from relay_service.config import RelayConfig, socket_path
from relay_service.core.attachment import Accepted
from relay_service.core.manifest import Manifest

LAYOUT = seam_layout()


class Fleet:
    """Relays, their clients, and the engines attached to them."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.data = random_bytes(LAYOUT)
        self._relays: list[Relay] = []
        self._clients: list[RelayClient] = []
        self._engines: list[FakeEngine] = []

    async def relay(self, listen: str = "127.0.0.1:0", **settings) -> Relay:
        """Starts a relay."""
        relay = Relay(RelayConfig(listen=listen, grace_seconds=0, **settings))
        await relay.start()
        self._relays.append(relay)
        return relay

    async def stop(self, relay: Relay) -> None:
        """Ends a relay as SIGTERM does."""
        self._relays.remove(relay)
        await relay.stop()

    def client(self, relay: Relay) -> RelayClient:
        """Opens a client of a relay."""
        self._clients.append(RelayClient(relay.address))
        return self._clients[-1]

    async def engine(
        self, relay: Relay, name: str, *contents: bytes, layout: Manifest | None = None,
        memory: Memory | None = None, **changes,
    ) -> FakeEngine:  # fmt: skip
        """Attaches an engine through the real protocol; without contents it is a dummy."""
        engine = self.unattached(name, *contents, layout=layout, memory=memory)
        path = socket_path(relay.address)
        answer = await engine.attach(path, **changes)
        assert isinstance(answer, Accepted), answer
        return engine

    def unattached(
        self, name: str, *contents: bytes, layout: Manifest | None = None,
        memory: Memory | None = None,
    ) -> FakeEngine:  # fmt: skip
        """Makes an engine that has not attached yet."""
        engine = FakeEngine(name, memory or Memory([layout or self.layout], contents))
        self._engines.append(engine)
        return engine

    async def seed(self, relay: Relay, name: str = "seed", **changes) -> FakeEngine:
        """Attaches an engine that serves."""
        return await self.engine(relay, name, self.data, **changes)

    async def dummy(self, relay: Relay, name: str = "target", **changes) -> FakeEngine:
        """Attaches an engine without weights."""
        return await self.engine(relay, name, **changes)

    async def close(self) -> None:
        """Ends everything."""
        await asyncio.gather(*(client.close() for client in self._clients))
        for engine in self._engines:
            engine.close()
        await asyncio.gather(*(relay.stop() for relay in self._relays))


def arena_mappings() -> int:
    """Returns how many arenas this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:")


@pytest.fixture
async def fleet(monkeypatch):
    """An empty fleet with attachment sockets of its own; it leaves no arena mapped."""
    folder = tempfile.mkdtemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    before = arena_mappings()
    fleet = Fleet()
    yield fleet
    await fleet.close()
    shutil.rmtree(folder)
    await eventually(lambda: arena_mappings() == before)
