"""The processes between which the transports are measured: a seed without torch, and peers.

A role is a function `be_*` that runs in a process of its own and answers commands on a
pipe until its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import grpc

from benchmarks import table
from clients.channel import OPTIONS
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.config import DATA_CONNECTIONS
from relay_service.core.attachment import Attach
from relay_service.core.dtypes import DType
from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES, Manifest, weights_digest
from relay_service.memory.host import HostArena, create_memfd, seal
from relay_service.rpc.server import bind, new_server
from relay_service.transports.tcp_wire import PIECE_BYTES

UNIT_BYTES = (62 << 20) + (8 << 10)  # its last block is a short one
GLOO_PIECE_BYTES = 16 << 20
CONNECTIONS = tuple(sorted({1, 2, 4, DATA_CONNECTIONS}))
_RANGE = struct.Struct("<QQ")


@dataclass(frozen=True)
class Shared:
    """An arena of another process of this benchmark, which keeps its descriptor open."""

    pid: int
    fd: int
    manifest: Manifest

    def map(self, *, writable: bool = False) -> HostArena:
        """Maps it here."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR if writable else os.O_RDONLY)
        try:
            return HostArena(fd, self.manifest.data_bytes, writable=writable)
        finally:
            os.close(fd)


def new_arena(name: str, manifest: Manifest) -> tuple[int, HostArena]:
    """Makes a zeroed arena."""
    fd = create_memfd(name, manifest.data_bytes)
    arena = HostArena(fd, manifest.data_bytes, writable=True)
    arena.write_header(name)
    return fd, arena


async def attach(relay: str, name: str, fd: int, manifest: Manifest) -> GrpcRelayLink:
    """Attaches an instance: ready when its manifest is verified, else a dummy."""
    digest = weights_digest([manifest])
    link = GrpcRelayLink(relay)
    message = Attach(
        instance=name, generation=name, model="benchmark",
        state=State.READY if digest else State.DUMMY, format=Format((("model", "benchmark"),)),
        placement=Placement(), weights=Weights("v0" if digest else "", digest, 0),
        manifests=(manifest,), artifacts={},
    )  # fmt: skip
    await link.attach(lambda: message, lambda: [fd])
    return link


def be_seed(pipe: Connection, relay: str, units: int) -> None:
    """Serves an arena of random blocks, all different, until the pipe ends."""
    tensor = (UNIT_BYTES // 2048, 1024)
    manifest = lay_out(
        0,
        [UnitSpec(f"u.{n}", (TensorSpec(f"w.{n}", DType.BF16, tensor),)) for n in range(units)],
    )
    fd, arena = new_arena("seed", manifest)
    digests, noise = [], os.urandom(BLOCK_BYTES)
    for block in map(manifest.block, range(manifest.block_count)):
        data = os.urandom(4096) + noise[4096 : block.nbytes]
        digests.append(arena.land(block.offset, data))
    seal(fd)
    manifest = manifest.with_digests(digests)

    async def serve() -> None:
        link = await attach(relay, "seed", fd, manifest)
        pipe.send(Shared(os.getpid(), fd, manifest))
        await asyncio.to_thread(pipe.poll, None)
        await link.close()

    asyncio.run(serve())


def be_bare_server(pipe: Connection, seed: Shared) -> None:
    """Streams the seed's bytes to whoever calls, until the pipe ends."""
    arena = seed.map()

    async def read(_: bytes, __: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for offset in range(0, arena.data_bytes, BLOCK_BYTES):
            yield bytes(arena.view(offset, min(BLOCK_BYTES, arena.data_bytes - offset)))

    async def serve() -> None:
        server = new_server()
        methods = {"Read": grpc.unary_stream_rpc_method_handler(read)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        address = bind(server, "127.0.0.1:0")
        await server.start()
        pipe.send(address)
        await asyncio.to_thread(pipe.poll, None)
        await server.stop(None)

    asyncio.run(serve())


def be_bare_client(pipe: Connection, scratch: Shared, address: str) -> None:
    """Reads the stream into the scratch arena, once per command."""
    arena = scratch.map(writable=True)

    async def read() -> float:
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            await channel.channel_ready()
            began, offset = time.perf_counter(), 0
            async for message in channel.unary_stream("/bare/Read")(b""):
                ctypes.memmove(arena.address + offset, message, len(message))
                offset += len(message)
            return time.perf_counter() - began

    pipe.send("ready")
    table.answer(pipe, {"bare_grpc": lambda: asyncio.run(read())})


def be_socket_server(pipe: Connection, seed: Shared) -> None:
    """Sends the ranges that are asked for out of the seed's arena, until the pipe ends."""
    arena = seed.map()

    def serve(sock: socket.socket) -> None:
        with sock:
            while len(asked := sock.recv(_RANGE.size, socket.MSG_WAITALL)) == _RANGE.size:
                start, end = _RANGE.unpack(asked)
                for offset in range(start, end, BLOCK_BYTES):
                    sock.sendall(arena.view(offset, min(BLOCK_BYTES, end - offset)))

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    pipe.send(listener.getsockname())
    pipe.poll(None)


def be_socket_client(pipe: Connection, scratch: Shared, address: tuple[str, int]) -> None:
    """Receives all ranges in their places, over as many connections as the command says.

    As simply as it goes, or woken as seldom as our own reader is.
    """
    arena = scratch.map(writable=True)

    def fill(sock: socket.socket, start: int, end: int) -> None:
        if sock.recv_into(arena.view(start, end - start), 0, socket.MSG_WAITALL) != end - start:
            raise SystemExit("bare sockets: cut short")

    def receive(sock: socket.socket, start: int, end: int) -> None:
        sock.sendall(_RANGE.pack(start, end))
        for offset in range(start, end, BLOCK_BYTES):
            fill(sock, offset, min(offset + BLOCK_BYTES, end))

    def receive_lowat(sock: socket.socket, start: int, end: int) -> None:
        sock.sendall(_RANGE.pack(start, end))
        last = end - PIECE_BYTES
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PIECE_BYTES)
        for offset in range(start, last, BLOCK_BYTES):
            fill(sock, offset, min(offset + BLOCK_BYTES, last))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        fill(sock, last, end)

    def move(connections: int, receive: Callable[[socket.socket, int, int], None]) -> float:
        with contextlib.ExitStack() as stack:
            connect = socket.create_connection
            socks = [stack.enter_context(connect(address)) for _ in range(connections)]
            threads = stack.enter_context(ThreadPoolExecutor(connections))
            blocks = -(-arena.data_bytes // BLOCK_BYTES)
            share = -(-blocks // connections) * BLOCK_BYTES
            starts = [min(number * share, arena.data_bytes) for number in range(connections)]
            ends = [*starts[1:], arena.data_bytes]
            began = time.perf_counter()
            list(threads.map(receive, socks, starts, ends))
            return time.perf_counter() - began

    pipe.send("ready")
    ways = {"bare_sockets": receive, "bare_sockets_lowat": receive_lowat}
    table.answer(
        pipe,
        {f"{name}_{n}": partial(move, n, way) for name, way in ways.items() for n in CONNECTIONS},
    )


def be_gloo(pipe: Connection, rank: int, store: str, seed: Shared, scratch: Shared) -> None:
    """Sends (rank 0) or receives (rank 1) all pieces at once, once per command."""
    import torch
    from torch import distributed

    pipe.send("ready")
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    torch.set_num_threads(1)
    source, target = (
        torch.frombuffer(arena.view(0, arena.data_bytes), dtype=torch.uint8)
        for arena in (seed.map(), scratch.map(writable=True))
    )
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def move() -> float:
        distributed.barrier()
        began = time.perf_counter()
        if rank == 0:
            works = [distributed.isend(piece, 1) for piece in source.split(GLOO_PIECE_BYTES)]
        else:
            works = [distributed.irecv(piece, 0) for piece in target.split(GLOO_PIECE_BYTES)]
        for work in works:
            work.wait()
        return time.perf_counter() - began

    def copy() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    table.answer(pipe, {"gloo": move, "memcpy_torch": copy})
