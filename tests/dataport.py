"""A data port in this process, on a loop of its own, and a scripted one that misbehaves."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from fakes import BytesArena, Memory, attach_message, instance, lay_out_bytes, random_bytes

from relay_service.core.grants import Grants, runs_of
from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.offer import Offer
from relay_service.core.ports import Place
from relay_service.core.rate import TokenBucket
from relay_service.core.reading import Way
from relay_service.memory.mapping import map_arena
from relay_service.transports.tcp_server import DataServer
from relay_service.transports.tcp_wire import (
    FRAME_BYTES,
    HELLO_BYTES,
    MAGIC,
    Kind,
    pack,
    unpack,
    wrap,
)

LAYOUT = lay_out_bytes([5 * BLOCK_BYTES, 100, BLOCK_BYTES + 1])


class Port:
    """The data port of a relay with one seed."""

    def __init__(self) -> None:
        self.data = random_bytes(LAYOUT)
        self.memory = Memory([LAYOUT], [self.data])
        self.manifest = self.memory.manifests[0]
        self.holdings = Holdings()
        self.grants = Grants()
        self.egress = TokenBucket()
        attach = attach_message("seed", self.memory)
        self.holding = Holding(attach, [os.dup(self.memory.descriptors[0])], map_arena)
        self.holdings.add(self.holding)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = DataServer("127.0.0.1:0", self.holdings, self.grants, self.egress)
        self._accepting = asyncio.run_coroutine_threadsafe(self.server.accept(), self._loop)

    def lease(self) -> str:
        """Takes a lease on the seed."""
        weights = self.holding.weights
        return self.holdings.acquire("seed", "", weights.epoch, weights.digest, "target").lease

    def tokens(self, lease: str, blocks: list[int], connections: int = 1) -> list[bytes]:
        """Gets grants as the RPC does."""
        return self.grants.issue(self.holdings.grant(lease, 0, runs_of(blocks)), connections)

    @contextmanager
    def being_filled(self, name: str):
        """Adds an instance that has all blocks and is not committed; yields a lease on it."""
        memory, weights = Memory([LAYOUT]), self.holding.weights
        holding = Holding(attach_message(name, memory), [os.dup(memory.descriptors[0])], map_arena)
        self.holdings.add(holding)
        (receiver,) = holding.open_receivers()
        receiver.expect(self.manifest)
        holding.offer(Offer(instance("seed", weights=weights), [self.manifest], b"", ()))
        for block in map(LAYOUT.block, range(LAYOUT.block_count)):
            receiver.land(block.index, memoryview(self.data)[block.offset :][: block.nbytes])
        try:
            yield self.holdings.acquire(name, "", 0, weights.digest, "target").lease
        finally:
            holding.return_mapping()
            memory.close()

    @contextmanager
    def connected(self, first: bytes = b""):
        """Connects, says something, and yields the socket."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as sock:
            sock.sendall(first)
            yield sock

    @contextmanager
    def admitted(self, token: bytes):
        """Connects, shows a grant, and yields the wire once it is taken."""
        with self.connected(MAGIC + token) as sock:
            wire = wrap(sock, 20)
            assert wire.receive_frame()[0] == Kind.WELCOME
            yield wire

    @property
    def guests(self) -> int:
        """Connections that there are."""
        return len(self.server._guests)

    def close(self) -> None:
        """Ends all threads. Doing so twice is harmless."""
        if self._loop.is_closed():
            return
        self._accepting.cancel()
        asyncio.run_coroutine_threadsafe(self.server.close(0), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.holdings.close()
        self.memory.close()


def reason_of(wire) -> str:
    """Receives the refusal that must come next; returns its words."""
    kind, nbytes, _ = wire.receive_frame()
    assert kind == Kind.FAILED, kind
    said = bytearray(nbytes)
    wire.receive(said)
    return said.decode()


class InPlaceArena(BytesArena):
    """An arena into which nothing may be copied that could be received in its place."""

    def land(self, offset: int, data: memoryview | bytes) -> bytes:
        """Is for what was received elsewhere."""
        raise AssertionError("copied")


class Script:
    """A source's data port that says what a test wants, as the control that leads there too."""

    epoch = 1
    upstream = ()

    def __init__(self, say: Callable[[socket.socket], None]) -> None:
        self._say = say
        self._data = random_bytes(LAYOUT)
        memory = Memory([LAYOUT], [self._data])
        self.manifest_of_rank = memory.manifests[0]
        self.source = instance(address="127.0.0.1:1")
        self.closed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f":{self._listener.getsockname()[1]}"
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accept()
        memory.close()

    def block(self, index: int) -> bytes:
        """Returns the right bytes of a block."""
        block = LAYOUT.block(index)
        return self._data[block.offset : block.offset + block.nbytes]

    def message(self, index: int) -> bytes:
        """Returns a block as it should come, by itself."""
        return self.run([index])

    def run(self, blocks: list[int]) -> bytes:
        """Returns blocks that follow one another as they should come, under one verdict."""
        data = b"".join(map(self.block, blocks))
        return pack(Kind.DATA, blocks[0], len(blocks)) + data + pack(Kind.GOOD, blocks[0], 1)

    async def data_address(self, _source) -> str:
        """Leads to the script."""
        return self.address

    async def open(self, _source, _holder, *, yields=False) -> Script:
        """Is its own session."""
        return self

    async def grant(self, _rank, _runs, _connections) -> tuple[str, list[bytes]]:
        """Grants one connection."""
        return self.address, [bytes(HELLO_BYTES - len(MAGIC))]

    async def manifest(self, _rank, _holder=None):
        """Returns the manifest of the right bytes."""
        return self.manifest_of_rank

    async def probe(self) -> bytes:
        """Has none."""
        return b""

    async def close(self) -> None:
        """Counts."""
        self.closed += 1

    def stop(self) -> None:
        """Closes everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for peer in self._peers:
            peer.close()

    def _accept(self) -> None:
        def run() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = self._listener.accept()
                    self._peers.append(peer)
                    self._start(lambda peer=peer: self._serve(peer))

        self._start(run)

    def _start(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError):
            wire = wrap(peer, 20)
            wire.receive(bytearray(HELLO_BYTES))
            frame = bytearray(FRAME_BYTES)
            wire.receive(frame)  # a reader asks before it is told that it may
            assert unpack(frame)[0] == Kind.READ
            wire.send(pack(Kind.WELCOME))
            self._say(peer)


@dataclass(frozen=True)
class LandRank:
    """Lands the blocks of one rank, from one source alone."""

    way: Way
    rank: int

    def __call__(self, index: int, data: memoryview, /) -> None:
        """Lands and verifies one block."""
        self.way.land(self.rank, index, data)

    def place(self, blocks: Sequence[int]) -> AbstractContextManager[Place | None]:
        """Lends the memory where blocks belong."""
        return self.way.place(self.rank, blocks)
