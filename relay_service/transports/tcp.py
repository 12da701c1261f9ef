"""Reads blocks over bare sockets from a relay of another host. No torch, no gRPC.

Lease, manifest and one-time grants are asked for over a `Control`; the bytes come over a few
connections to the data port of the source's relay, each one read by a thread straight into
the arena. An arena that lies on a device, or that is allocated as it is written, gets them
out of a buffer, as with the other transports.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from relay_service.core.grants import MAX_PER_READ, Run, runs_of
from relay_service.core.instance import Instance
from relay_service.core.manifest import Manifest
from relay_service.core.ports import Land, SourceSession
from relay_service.core.rate import TokenBucket
from relay_service.core.tls_contexts import TlsContexts
from relay_service.core.together import in_thread, together
from relay_service.errors import RelayError, SourceFailed
from relay_service.transports.tcp_connect import Endpoint, connect, endpoint_of, secure
from relay_service.transports.tcp_read import BlockReader
from relay_service.transports.tcp_wire import Wire, wrap

REACH_SECONDS = 1.0
"""Time in which a data port must be reached; who is further away is read over gRPC."""
CONNECT_SECONDS = 5.0
STALL_SECONDS = 10.0
BLOCKS_PER_CONNECTION = 4
"""Fewer aren't worth a connection."""
BYTES_PER_SECOND_EACH = 256 << 20
"""What a connection can carry in any case: a reader with a lower limit needs no more of them."""
_MAX_THREADS = 128
_THREADS = ThreadPoolExecutor(_MAX_THREADS, "tcp-reader")


class ControlSession(SourceSession, Protocol):
    """A lease on a source, and grants under it."""

    epoch: int
    """Epoch at which the lease reads."""

    async def grant(
        self, rank: int, runs: Sequence[Run], connections: int
    ) -> tuple[str, list[bytes]]:
        """Returns the data address and tokens for at most so many connections.

        Raises `SourceFailed`, `EpochChanged` or `LeaseEnded`.
        """


class Control(Protocol):
    """What is asked of a source's relay before bytes move."""

    async def data_address(self, source: Instance) -> str:
        """Returns `HOST:PORT`, without a host for that of the relay; empty for no data port.

        Raises `SourceFailed` when it does not answer.
        """

    async def open(self, source: Instance, holder: str, *, yields: bool = False) -> ControlSession:
        """Takes a lease for `holder`. Raises `SourceFailed`, or what the source refuses with."""


class TcpTransport:
    """Reaches sources whose relay has a data port."""

    name = "tcp"

    def __init__(
        self,
        control: Control,
        tls: TlsContexts | None = None,
        connections: int = MAX_PER_READ,
    ) -> None:
        self._control = control
        self._tls = tls
        self._connections = connections

    async def unusable(self, source: Instance) -> str:
        """Says so when the data port isn't there, or not reached within a second."""
        try:
            address = await self._control.data_address(source)
            if not address:
                return f"the relay at {source.address} has no data port: it is too old"
            sock = await connect(endpoint_of(address, source.address), REACH_SECONDS)
        except SourceFailed as error:
            return str(error)
        sock.close()
        return ""

    async def open(self, source: Instance, holder: str, *, yields: bool = False) -> TcpSession:
        """Takes a lease for `holder`. Raises `SourceFailed`, or what the source refuses with."""
        control = await self._control.open(source, holder, yields=yields)
        return TcpSession(control, source, self._tls, self._connections)


@dataclass
class _Streams:
    """The connections of one read: when one fails, all end."""

    failure: BaseException | None = None
    wires: list[Wire] = field(default_factory=list)

    def add(self, wire: Wire) -> None:
        """Takes a connection up."""
        self.wires.append(wire)
        if self.failure:
            wire.interrupt()

    def fail(self, error: BaseException) -> None:
        """Ends all for the first thing that went wrong; what follows from it is not told."""
        self.failure = self.failure or error
        self.interrupt()

    def interrupt(self) -> None:
        """Ends all waits on the connections."""
        for wire in self.wires:
            wire.interrupt()


class TcpSession:
    """A lease at another relay, read over its data port."""

    def __init__(
        self, control: ControlSession, source: Instance, tls: TlsContexts | None, connections: int
    ) -> None:
        self._control = control
        self._connections = connections
        self._source = source
        self._tls = tls
        self._manifests: dict[int, Manifest] = {}

    @property
    def upstream(self) -> Sequence[str]:
        """Names everyone whom an incomplete source is filled from."""
        return self._control.upstream

    async def manifest(self, rank: int, holder: Instance | None = None) -> Manifest:
        """Returns the manifest of one rank, from whoever holds the same one."""
        self._manifests[rank] = manifest = await self._control.manifest(rank, holder)
        return manifest

    async def probe(self) -> bytes:
        """Returns the probe that the source recorded; empty where it has none."""
        return await self._control.probe()

    async def close(self) -> None:
        """Gives the lease back."""
        await self._control.close()

    async def read(self, rank: int, blocks: Sequence[int], land: Land, limit: TokenBucket) -> None:
        """Reads blocks over a few connections at once, each one a part that lies together."""
        if not blocks:
            return
        wanted = _worthwhile(self._connections, len(blocks), limit)
        address, tokens = await self._control.grant(rank, runs_of(blocks), wanted)
        endpoint = endpoint_of(address, self._source.address)
        if not tokens:
            raise SourceFailed(f"{self._source.instance}: its relay granted nothing")
        manifest = self._manifests.get(rank) or await self.manifest(rank)
        streams, share = _Streams(), math.ceil(len(blocks) / min(wanted, len(tokens)))
        ordered = sorted(blocks)
        await together(
            *(
                self._read_share(
                    streams, endpoint, token, limit, manifest, land,
                    deque(ordered[number * share : (number + 1) * share]),
                )
                for number, token in enumerate(tokens[:wanted])
            )
        )  # fmt: skip
        if streams.failure:
            raise streams.failure

    async def _read_share(
        self,
        streams: _Streams,
        endpoint: Endpoint,
        token: bytes,
        limit: TokenBucket,
        manifest: Manifest,
        land: Land,
        share: deque[int],
    ) -> None:
        """Reads a part of the blocks; what goes wrong is told to `streams`."""
        wire = None
        try:
            sock = await connect(endpoint, CONNECT_SECONDS)
            if self._tls:
                sock = await secure(sock, endpoint[0], self._tls, CONNECT_SECONDS, _THREADS)
            wire = wrap(sock, STALL_SECONDS)
            streams.add(wire)
            reader = BlockReader(wire, token, self._control.epoch, manifest, land)
            # Without a limit all at once: the source stands still while it waits to be asked.
            most = limit.batch_blocks if limit.bytes_per_second else len(share)
            while share and not streams.failure:
                batch = [share.popleft() for _ in range(min(most, len(share)))]
                await limit.take(sum(manifest.block(index).nbytes for index in batch))
                read = partial(reader.read, batch, last=not share)
                await in_thread(read, _THREADS, streams.interrupt)
        except TimeoutError:
            streams.fail(SourceFailed(f"no block for {STALL_SECONDS:g} s"))
        except OSError as error:
            streams.fail(SourceFailed(f"{self._source.instance}: {error}"))
        except (RelayError, IndexError) as error:
            streams.fail(error)
        except BaseException as error:
            streams.fail(error)
            raise
        finally:
            if wire:
                wire.close()


def _worthwhile(most: int, blocks: int, limit: TokenBucket) -> int:
    """Returns how many connections a read of so many blocks is worth."""
    if limit.bytes_per_second:
        most = min(most, math.ceil(limit.bytes_per_second / BYTES_PER_SECOND_EACH))
    return max(1, min(most, blocks // BLOCKS_PER_CONNECTION))
