"""Relays with bare arenas, one process each: the hosts between which weights fan out."""

from __future__ import annotations

import asyncio
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transport_peers import attach, new_arena
from clients.relay import RelayClient
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.app import Relay
from relay_service.config import RelayConfig
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES, Manifest
from relay_service.core.pull_report import PullOptions


def layout(blocks: int) -> Manifest:
    """Describes an arena of so many whole blocks."""
    tensor = TensorSpec("w", DType.BF16, (blocks * BLOCK_BYTES // 2048, 1024))
    return lay_out(0, [UnitSpec("layer", (tensor,))])


def be_host(
    pipe: Connection, name: str, directory: str, blocks: int, egress_limit_bytes_per_second: int
) -> None:
    """Runs a relay, with a seed where it is the directory; answers commands until the pipe ends.

    `(number, begin, source)` fills a new dummy from one source, or from any, at a moment of the
    host's clock; it answers with when the last block was verified and what the report says.
    `leave` takes that dummy away. `egress` answers with the bytes that were given away so far.
    """
    config = RelayConfig(
        listen="127.0.0.1:0", join=directory, grace_seconds=0,
        egress_limit_bytes_per_second=egress_limit_bytes_per_second,
    )  # fmt: skip
    asyncio.run(_Host(pipe, name, blocks).serve(config))


class _Host:
    """One relay and the arena beside it."""

    def __init__(self, pipe: Connection, name: str, blocks: int) -> None:
        self._pipe = pipe
        self._name = name
        self._layout = layout(blocks)
        self._fd, self._arena = new_arena(name, self._layout)
        self._link: GrpcRelayLink | None = None

    async def _leave(self) -> None:
        if self._link:
            await self._link.close()
        self._link = None

    async def serve(self, config: RelayConfig) -> None:
        self._relay = Relay(config)
        await self._relay.start()
        if not config.join:
            self._link = await attach(self._relay.address, "seed", self._fd, self._filled())
        self._pipe.send(self._relay.address)
        while True:
            try:
                command = await asyncio.to_thread(self._pipe.recv)
            except EOFError:
                break
            if command == "egress":
                self._pipe.send(sum(self._relay.holdings.leases.bytes_served.values()))
            elif command == "leave":
                self._pipe.send(await self._leave())
            else:
                self._pipe.send(await self._fill(*command))
        await self._leave()
        await self._relay.stop()

    def _filled(self) -> Manifest:
        digests, noise = [], os.urandom(BLOCK_BYTES)
        for block in map(self._layout.block, range(self._layout.block_count)):
            data = os.urandom(4096) + noise[4096 : block.nbytes]
            digests.append(self._arena.land(block.offset, data))
        return self._layout.with_digests(digests)

    async def _fill(self, number: int, begin: float, source: str) -> dict[str, Any]:
        """Fills the arena anew as a dummy of its own; all hosts begin at the same moment."""
        name = f"{self._name}-{number}"
        self._link = link = await attach(self._relay.address, name, self._fd, self._layout)
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        options = PullOptions(source_instance=source, transport="tcp")
        filled = await link.pull(options, lambda _: None)
        ended = time.monotonic()
        await link.return_mapping()
        async with RelayClient(self._relay.address) as client:
            landed = await client.manifest(name, "", 0)
        return {
            "ended": ended, "seconds_matching": filled.seconds_matching,
            "digest": landed.digest, "bytes_reread": filled.bytes_reread,
            "source": filled.path[-1].source_instance,
        }  # fmt: skip
