"""Joins the rings of the relay service, runs it, and ends it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import uuid

from seedrelay.v1 import relay_pb2_grpc

from relay_service.config import RelayConfig, socket_path
from relay_service.core.attach_server import AttachServer
from relay_service.core.holdings import Holdings
from relay_service.core.rate import TokenBucket
from relay_service.core.registry import RENEW_SECONDS, Registry
from relay_service.core.transfers import Transfers
from relay_service.memory.host import HostArena
from relay_service.rpc import server as rpc
from relay_service.rpc.directory import DirectoryFleet
from relay_service.rpc.servicer import RelayServicer
from relay_service.transports.grpc_stream import BlockServicer, GrpcTransport
from relay_service.transports.shm import ShmTransport

_log = logging.getLogger(__name__)


async def serve(config: RelayConfig) -> None:
    """Runs a relay until SIGTERM or SIGINT. Raises `ConfigError` when it cannot listen."""
    stopping = stop_on_signals()
    server = rpc.new_server()
    address = rpc.bind(server, config.listen)
    generation = uuid.uuid4().hex
    holdings, registry = Holdings(), Registry()
    egress = TokenBucket(config.egress_limit_bytes_per_second)
    fleet = DirectoryFleet(
        config.advertise or address, generation, config.join, registry,
        lambda: holdings.records(config.advertise or address),
    )  # fmt: skip
    transfers = Transfers(fleet, [ShmTransport(holdings, egress), GrpcTransport()])
    path = socket_path(int(address.rpartition(":")[2]))
    attach_server = AttachServer(path, holdings, transfers, HostArena)
    server.add_generic_rpc_handlers((BlockServicer(holdings, egress).handler(),))
    relay_pb2_grpc.add_RelayServiceServicer_to_server(
        RelayServicer(holdings, registry, fleet, transfers, str(path)), server
    )
    health = await rpc.add_standard_services(server)
    await attach_server.start()
    await server.start()
    announce_listening("relay", "", address)
    background = [
        asyncio.create_task(fleet.keep_announced()),
        asyncio.create_task(_sweep(holdings)),
    ]
    try:
        await stopping.wait()
    finally:
        _log.info("stopping")
        await health.enter_graceful_shutdown()
        await attach_server.close()
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        await server.stop(config.grace_seconds)
        holdings.close()


def stop_on_signals() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; a second one exits at once."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping


def announce_listening(service: str, instance: str, address: str) -> None:
    """Prints the one line that a service says on stdout."""
    line = {"event": "listening", "service": service, "instance": instance,
            "address": address, "pid": os.getpid()}  # fmt: skip
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)  # noqa: T201


async def _sweep(holdings: Holdings) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        holdings.sweep()
