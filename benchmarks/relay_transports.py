"""How fast do weights move through the relay, beside memcpy, a bare gRPC stream and gloo?

Every method moves the same bytes out of one sealed arena, in interleaved rounds:

    memcpy       one thread, all at once, mapped memfd to mapped memfd; memcpy_torch: by copy_
    shm, tcp_N, grpc   a pull through real relay processes, every block verified as it lands
    bare_sockets_N     1 MiB at a time, arena to arena, N connections, not verified;
                       bare_sockets_lowat_N: woken for 256 KiB at a time, as tcp is
    bare_grpc    1 MiB messages through grpc.aio with our options, copied in, not verified
    gloo         isend and irecv of all pieces at once between two processes, not verified

All fill the same pages, those of one arena; for a pull it is attached as a new dummy. Before each
move it is zeroed, and all processes have done with the one before (a relay unmaps the arena of a
target that has left); after it its bytes are compared with the source. None of that is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import math
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import table
from benchmarks.transport_peers import (
    CONNECTIONS,
    GLOO_PIECE_BYTES,
    UNIT_BYTES,
    Shared,
    attach,
    be_bare_client,
    be_bare_server,
    be_gloo,
    be_seed,
    be_socket_client,
    be_socket_server,
    new_arena,
)
from clients.launch import Service
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.config import DATA_CONNECTIONS
from relay_service.core.pull_report import PullOptions
from relay_service.memory.host import HostArena

GOALS = {
    "shm_over_memcpy": ">= 0.75",
    "grpc_over_bare_grpc": ">= 0.9",
    "tcp_over_bare_sockets": ">= 0.9",
    "tcp_over_bare_sockets_lowat": ">= 0.9",
    "tcp_over_gloo": ">= 1.0",
    "seed_cpu_seconds_per_gib_shm": "<= 0.02",
}
COLUMNS = {
    "gib_per_second": "  GiB/s",
    "seconds": "seconds",
    "seconds_wall": "   wall",
    "source_cpu_seconds_per_gib": "source CPU s/GiB",
    "target_cpu_seconds_per_gib": "target CPU s/GiB",
    "seed_cpu_seconds_per_gib": "seed CPU s/GiB",
}
IDLE_SECONDS, IDLE_CPU_SECONDS = 0.1, 0.02
SETTLE_SECONDS = 20.0
BARE_SOCKETS = ("bare_sockets", "bare_sockets_lowat")
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class Method:
    """One way to move the bytes, and the processes whose time it costs."""

    name: str
    sources: list[int]
    targets: list[int]
    target: Callable[[], AbstractAsyncContextManager[HostArena]]
    """Lends the zeroed scratch arena."""
    move: Callable[[], Awaitable[float]]
    """Fills it and returns the seconds that it took."""


class Bench:
    """What all methods share: the seed's arena, and a scratch arena that each of them fills."""

    def __init__(self, seed: Shared) -> None:
        self.seed = seed
        self.layout = seed.manifest.without_digests()
        self.source = seed.map()
        fd, self.scratch = new_arena("scratch", self.layout)
        self.shared = Shared(os.getpid(), fd, self.layout)
        self.everyone: list[int] = []
        """All processes that move bytes."""
        self._targets = 0

    async def memcpy(self) -> float:
        """Copies on this thread, all at once."""
        began = time.perf_counter()
        ctypes.memmove(self.scratch.address, self.source.address, self.source.data_bytes)
        return time.perf_counter() - began

    def by_peers(
        self, name: str, source: list[int], target: int, asked: list[Connection]
    ) -> Method:
        """Has peers of this benchmark run the command `name`; the last one tells the seconds."""

        async def move() -> float:
            for pipe in asked:
                pipe.send(name)
            return float([pipe.recv() for pipe in asked][-1])

        return Method(name, source, [target], self.emptied, move)

    def by_relays(self, name: str, source: int, relay: Service) -> Method:
        """Pulls by the transport that `name` begins with into an instance at `relay`."""
        transport = name.partition("_")[0]
        link = GrpcRelayLink(relay.address)

        @asynccontextmanager
        async def attached() -> AsyncIterator[HostArena]:
            nonlocal link
            self._targets += 1
            async with self.emptied() as arena:
                link = await attach(
                    relay.address, f"target-{self._targets}", self.shared.fd, self.layout
                )
                try:
                    yield arena
                    await link.return_mapping()
                finally:
                    await link.close()

        async def move() -> float:
            options = PullOptions(source_instance="seed", transport=transport)
            report = await link.pull(options, lambda _: None)
            if (report.transport, report.bytes_moved) != (transport, self.layout.weight_bytes):
                raise SystemExit(f"{name}: {report.bytes_moved} bytes moved by {report.transport}")
            return report.seconds_transfer

        return Method(name, [source], [relay.pid], attached, move)

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[HostArena]:
        """Lends the scratch arena, zeroed."""
        ctypes.memset(self.scratch.address, 0, self.scratch.data_bytes)
        yield self.scratch

    async def settle(self, pids: Sequence[int]) -> None:
        """Waits until processes have nothing to do any more."""
        async with asyncio.timeout(SETTLE_SECONDS):
            before = -math.inf
            while (used := table.cpu_seconds(pids)) - before > IDLE_CPU_SECONDS:
                before = used
                await asyncio.sleep(IDLE_SECONDS)

    async def measure(self, method: Method, number: int) -> table.Row:
        """Moves the bytes once, checks that they have landed, and returns the row."""
        gib = self.layout.weight_bytes / (1 << 30)
        groups = {"source": method.sources, "target": method.targets, "seed": [self.seed.pid]}
        async with method.target() as arena:
            await self.settle(self.everyone)
            before = {side: table.cpu_seconds(pids) for side, pids in groups.items()}
            began = time.perf_counter()
            seconds = await method.move()
            wall = time.perf_counter() - began
            used = {side: table.cpu_seconds(pids) - before[side] for side, pids in groups.items()}
            if _libc.memcmp(arena.address, self.source.address, arena.data_bytes):
                raise SystemExit(f"{method.name}: the bytes that landed are not the seed's")
        return {
            "method": method.name, "round": number, "seconds": seconds, "seconds_wall": wall,
            "gib_per_second": gib / seconds,
            **{f"{side}_cpu_seconds_per_gib": cpu / gib for side, cpu in used.items()},
        }  # fmt: skip


async def compare(units: int, rounds: int, folder: Path) -> list[table.Row]:
    """Starts everything, measures in interleaved rounds, ends everything."""
    listen = ["relay", "--listen", "127.0.0.1:0"]
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        near = start(Service(listen, folder / "near.log"))
        fars = {}
        for n in CONNECTIONS:
            told = [*listen, "--join", near.address, "--data-connections", str(n)]
            fars[n] = start(Service(told, folder / f"far-{n}.log"))
        _, _, seed = start(table.peer(be_seed, near.address, units))
        bench = Bench(seed)
        server, _, address = start(table.peer(be_bare_server, seed))
        client, called, _ = start(table.peer(be_bare_client, bench.shared, address))
        near_end, _, port = start(table.peer(be_socket_server, seed))
        far_end, sockets, _ = start(table.peer(be_socket_client, bench.shared, port))
        gloo = [
            start(table.peer(be_gloo, rank, str(folder / "store"), seed, bench.shared))
            for rank in (0, 1)
        ]
        (sender, send, _), (receiver, receive, _) = gloo
        bare = [f"{name}_{n}" for name in BARE_SOCKETS for n in CONNECTIONS]
        methods = [
            Method("memcpy", [], [os.getpid()], bench.emptied, bench.memcpy),
            bench.by_peers("memcpy_torch", [], receiver, [receive]),
            bench.by_relays("shm", seed.pid, near),
            *(bench.by_relays(f"tcp_{n}", near.pid, fars[n]) for n in CONNECTIONS),
            *(bench.by_peers(name, [near_end], far_end, [sockets]) for name in bare),
            bench.by_relays("grpc", near.pid, fars[1]),
            bench.by_peers("bare_grpc", [server], client, [called]),
            bench.by_peers("gloo", [sender], receiver, [send, receive]),
        ]
        bench.everyone = sorted({p for one in methods for p in (*one.sources, *one.targets)})
        # The first round connects, warms up, and does not count.
        rows = [await bench.measure(m, number) for number in range(rounds + 1) for m in methods]
    return [row for row in rows if row["round"]]


def figures(rows: list[table.Row]) -> dict[str, float]:
    """Draws the figures from the rows."""
    seed = [row["seed_cpu_seconds_per_gib"] for row in rows if row["method"] == "shm"]
    tcp = f"tcp_{DATA_CONNECTIONS}"
    pairs = [("shm", "memcpy"), ("grpc", "bare_grpc"), ("grpc", "memcpy"), ("gloo", "memcpy"),
             ("shm", "gloo"), ("grpc", "gloo"), ("memcpy_torch", "memcpy"), (tcp, "memcpy"),
             *((f"tcp_{n}", f"{b}_{n}") for n in CONNECTIONS for b in BARE_SOCKETS)]  # fmt: skip

    def ratio(one: str, other: str) -> float:
        return table.median_ratio(rows, one, other, "gib_per_second")

    return {
        **{f"tcp_over_{bare}": ratio(tcp, f"{bare}_{DATA_CONNECTIONS}") for bare in BARE_SOCKETS},
        "tcp_over_gloo": ratio(tcp, "gloo"),
        **{f"{one}_over_{other}": ratio(one, other) for one, other in pairs},
        "seed_cpu_seconds_per_gib_shm": sum(seed) / len(seed),
    }


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="62 MiB, 2 rounds: a smoke test")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of 1 GiB")
    options = parser.parse_args()
    units, rounds = (1, 2) if options.quick else (17, options.rounds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(compare(units, rounds, Path(folder)))
    settings = {
        "pages": "of one arena, long since touched: a first fill into fresh memory is slower",
        "bytes": units * UNIT_BYTES, "rounds": rounds, "gloo_piece_bytes": GLOO_PIECE_BYTES,
        "connections": DATA_CONNECTIONS,
        "seconds": "shm, tcp, grpc: seconds_transfer of the report, grant and connecting included, "
        "until the last block is verified; others: from the first byte to the last, once connected",
        "cpu": "user and system time during seconds_wall, for shm, tcp and grpc the whole pull: "
        "matching, lease and mapping the target's arena included",
        "versions": table.versions("grpcio", "torch", "xxhash"),
    }  # fmt: skip
    name = "relay_transports_quick" if options.quick else "relay_transports"
    table.write(name, settings, rows, COLUMNS, figures(rows), GOALS)


if __name__ == "__main__":
    main()
