"""Processes of a run: what each role does, until it is told to leave or its pipe ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine_service.core.fill import Filler
from engine_service.rpc import relay_link
from relay_service.app import Relay
from relay_service.config import RelayConfig
from relay_service.core import leases
from relay_service.transports import grpc_stream, tcp, tcp_feed
from tests.chaos.plan import Engine, Plan
from tests.chaos.stand_in import StandIn, ToldBringUp, config

EGRESS_BYTES_PER_SECOND = 16 << 20
"""Of each relay: a hop takes two seconds, in which things happen."""
DEADLINE_SECONDS = 40.0
"""In which a target must be filled: ten times what it takes on an idle machine."""
_SHORTER: dict[tuple[Any, str], float] = {
    (grpc_stream, "STALL_SECONDS"): 3.0,
    (tcp, "STALL_SECONDS"): 3.0,
    (tcp_feed, "STALL_SECONDS"): 3.0,
    (relay_link, "SILENCE_SECONDS"): 3.0,
    (leases, "LEASE_SECONDS"): 6.0,
    (leases, "LINGER_SECONDS"): 1.0,
}
"""Waits that cost a run time and nothing else: how long somebody who hangs is borne with."""
_PR_SET_PDEATHSIG = 1


def be(role: str, pipe: Connection, log: str, *arguments: Any) -> None:
    """Runs a role in this process. SIGUSR1 has it write to its log where it is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # prctl(2); also when stopped
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    faulthandler.register(signal.SIGUSR1, chain=False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for (module, name), seconds in _SHORTER.items():
        setattr(module, name, seconds)
    asyncio.run({"relay": _be_relay, "engine": _be_engine}[role](pipe, *arguments))


async def _be_relay(pipe: Connection, listen: str, directory: str) -> None:
    """Runs a relay; `cut` breaks its connections."""
    settings = RelayConfig(
        listen=listen, join=directory, grace_seconds=0,
        egress_limit_bytes_per_second=EGRESS_BYTES_PER_SECOND,
    )  # fmt: skip
    relay = Relay(settings)
    await relay.start()
    pipe.send({"address": relay.address})
    obeying = asyncio.create_task(_obey_cuts(pipe))
    failing = asyncio.create_task(relay.failed())
    done, _ = await asyncio.wait([obeying, failing], return_when=asyncio.FIRST_COMPLETED)
    failing.cancel()
    await relay.stop()
    for task in done:
        task.result()


async def _obey_cuts(pipe: Connection) -> None:
    async for _ in _commands(pipe):
        cut_connections()


async def _be_engine(pipe: Connection, plan: Plan, engine: Engine, relay: str, model: Path) -> None:
    """Serves as a seed, or starts as a target that fills itself."""
    told = config(engine.name, relay, model, engine.transport, DEADLINE_SECONDS)
    instance = StandIn(told, pipe.send)
    start = instance.seed(plan)
    if engine not in plan.seeds:
        start.close()
        start = ToldBringUp(instance, Filler(instance), pipe.send).run()
    starting = asyncio.create_task(start)
    async for command in _commands(pipe):
        await (instance.update(plan) if command == "update" else _flip(instance, plan))
    starting.cancel()
    await asyncio.wait([starting])
    await instance.close()


async def _flip(instance: StandIn, plan: Plan) -> None:
    instance.flip(plan.flipped)


async def _commands(pipe: Connection) -> AsyncIterator[str]:
    """Yields what comes through the pipe until `leave`, or its end. Writes tasks at SIGUSR2."""
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), come.set)
    loop.add_signal_handler(signal.SIGUSR2, _write_tasks)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            await come.wait()
            come.clear()
            while pipe.poll():
                if (command := pipe.recv()) == "leave":
                    return
                yield command


def _write_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


def cut_connections() -> None:
    """Breaks every TCP connection of this process, under whoever uses it."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - it changes while we look
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile, or no socket
            continue
        with sock, contextlib.suppress(OSError):  # one that only listens has no peer
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()
                sock.shutdown(socket.SHUT_RDWR)
