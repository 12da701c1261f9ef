"""A process that pulls a seed's weights again and again, as fast as it is told."""

from __future__ import annotations

import asyncio
import os
import time
from multiprocessing.connection import Connection

from benchmarks.transport_peers import new_arena
from clients.relay import RelayClient
from engine_service.core.ports import FillProgress
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.attachment import Attach
from relay_service.core.instance import Instance, State, Weights
from relay_service.core.manifest import Manifest
from relay_service.core.match import Target
from relay_service.core.pull_report import PullOptions


def be_puller(pipe: Connection, relay: str, transport: str) -> None:
    """Pulls from `seed` by way of `relay` until the pipe ends.

    A number starts it: the limit in bytes per second, 0 for none. It says `moving` when the
    first bytes have landed. None stops it: it says `moved`, with bytes and seconds since then.
    """
    asyncio.run(_serve(pipe, relay, transport))


async def _serve(pipe: Connection, relay: str, transport: str) -> None:
    seed, layout = await _find(relay)
    puller = _Puller(pipe, relay, transport, seed, layout)
    pipe.send("ready")
    while True:
        try:
            limit = await asyncio.to_thread(pipe.recv)
            pulling = asyncio.create_task(puller.pull(limit))
            listening = asyncio.create_task(asyncio.to_thread(pipe.recv))
            await asyncio.wait([pulling, listening], return_when=asyncio.FIRST_COMPLETED)
            moved, seconds = puller.moved, time.monotonic() - puller.began
            pulling.cancel()
            await asyncio.wait([pulling])
            if not pulling.cancelled():
                pulling.result()  # it never ends by itself: raises why it did
            await listening
        except EOFError:
            return
        pipe.send(("moved", moved, seconds))


async def _find(relay: str) -> tuple[Instance, Manifest]:
    """Waits until the relay knows the seed; returns what it holds."""
    async with RelayClient(relay) as client, asyncio.timeout(30):
        while True:
            for found in await client.sources(Target()):
                if found.instance.state is State.READY:
                    break
            else:
                await asyncio.sleep(0.05)
                continue
            async with RelayClient(found.instance.address) as holder:
                seed = found.instance
                manifest = await holder.manifest(seed.instance, seed.generation, 0)
                return seed, manifest.without_digests()


class _Puller:
    """One arena, which is attached as a new dummy for every pull."""

    def __init__(
        self, pipe: Connection, relay: str, transport: str, seed: Instance, layout: Manifest
    ) -> None:
        self.began = 0.0
        self._landed = self._first = 0
        self._pipe = pipe
        self._relay = relay
        self._transport = transport
        self._seed = seed
        self._layout = layout
        self._fd, _ = new_arena(f"puller-{transport}", layout)
        self._pulls = 0

    @property
    def moved(self) -> int:
        """Bytes that have landed since `began`."""
        return self._landed - self._first

    async def pull(self, limit: int) -> None:
        """Pulls until it is cancelled."""
        self._landed, self._first, self.began = 0, 0, 0.0
        options = PullOptions(
            source_instance=self._seed.instance, transport=self._transport,
            rate_limit_bytes_per_second=limit,
        )  # fmt: skip
        while True:
            before = self._landed

            def progress(now: FillProgress, before: int = before) -> None:
                self._landed = max(self._landed, before + now.bytes_verified)
                if self._landed and not self.began:
                    self._first, self.began = self._landed, time.monotonic()
                    self._pipe.send(("moving",))

            link = await self._attach()
            try:
                await link.pull(options, progress)
                await link.return_mapping()
            finally:
                await link.close()

    async def _attach(self) -> GrpcRelayLink:
        self._pulls += 1
        name = f"puller-{os.getpid()}-{self._pulls}"
        link = GrpcRelayLink(self._relay)
        message = Attach(
            instance=name, generation=name, model="benchmark", state=State.DUMMY,
            format=self._seed.format, placement=self._seed.placement,
            weights=Weights("", "", 0), manifests=(self._layout,), artifacts={},
        )  # fmt: skip
        await link.attach(lambda: message, lambda: [self._fd])
        return link
