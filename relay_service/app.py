"""Joins the rings of the relay service, runs it, and ends it cleanly."""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid

from clients.credentials import Credentials
from relay_service.config import RelayConfig, data_address, socket_path
from relay_service.core.attach_server import AttachServer
from relay_service.core.grants import Grants
from relay_service.core.holdings import Holdings
from relay_service.core.process import announce_listening, stop_on_signals
from relay_service.core.rate import TokenBucket
from relay_service.core.registry import RENEW_SECONDS, Registry
from relay_service.core.security import Security
from relay_service.core.tls_contexts import TlsContexts
from relay_service.core.transfers import Transfers
from relay_service.memory.mapping import map_arena
from relay_service.rpc import server as rpc
from relay_service.rpc.directory import DirectoryFleet
from relay_service.rpc.metrics import RelayCollector
from relay_service.rpc.metrics_server import MetricsServer
from relay_service.rpc.servicer import RelayServicer
from relay_service.transports.grpc_stream import BlockServicer, GrpcTransport
from relay_service.transports.shm import ShmTransport
from relay_service.transports.tcp import TcpTransport
from relay_service.transports.tcp_server import DataServer
from seedrelay.v1 import relay_pb2_grpc

_log = logging.getLogger(__name__)


class Relay:
    """One relay: all its parts, joined."""

    def __init__(self, config: RelayConfig) -> None:
        """Binds the port. Raises `ConfigError` when it cannot listen, or not as it must."""
        self._config = config
        credentials = Credentials(config.security, "relay")
        self._server = rpc.new_server(credentials)
        self.address = rpc.bind(self._server, config.listen, credentials)
        per_instance = config.egress_limit_per_instance_bytes_per_second
        self.holdings, grants = Holdings(per_instance), Grants()
        known_as = config.advertise or self.address
        registry, egress = Registry(), TokenBucket(config.egress_limit_bytes_per_second)
        host = self.address.rpartition(":")[0]
        data_listen = config.data_listen or f"{host}:0"
        self._data_server = DataServer(
            data_listen, self.holdings, grants, egress,
            _tls(config.security, ssl.Purpose.CLIENT_AUTH),
        )  # fmt: skip
        self._fleet = DirectoryFleet(
            known_as, uuid.uuid4().hex, config.join, registry,
            lambda: self.holdings.records(known_as), credentials,
            lambda: self.transfers.states(),  # noqa: PLW0108 - they need the fleet first
        )  # fmt: skip
        over_grpc = GrpcTransport(credentials)
        over_tcp = TcpTransport(
            over_grpc, _tls(config.security, ssl.Purpose.SERVER_AUTH), config.data_connections
        )
        self.transfers = Transfers(
            self._fleet,
            [ShmTransport(self.holdings, egress), over_tcp, over_grpc],
            TokenBucket(config.ingress_limit_bytes_per_second),
        )
        path = socket_path(self.address)
        self._attach_server = AttachServer(path, self.holdings, self.transfers, map_arena)
        self._server.add_generic_rpc_handlers((BlockServicer(self.holdings, egress).handler(),))
        relay_pb2_grpc.add_RelayServiceServicer_to_server(
            RelayServicer(
                self.holdings,
                registry,
                self._fleet,
                self.transfers,
                str(path),
                grants,
                data_address(config.data_listen, self._data_server.port),
            ),
            self._server,
        )
        self._metrics = MetricsServer(config.metrics_listen, config.security)
        self._metrics.show(RelayCollector(self.holdings, self.transfers, self._fleet))
        self.metrics_address = ""
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Takes attachments and calls, and announces itself."""
        self._health = await rpc.add_standard_services(self._server)
        await self._attach_server.start()
        self.metrics_address = await self._metrics.start()
        await self._server.start()
        self._background = [
            asyncio.create_task(self._fleet.keep_announced()),
            asyncio.create_task(_sweep(self.holdings, self.transfers)),
            asyncio.create_task(self._data_server.accept()),
        ]

    async def failed(self) -> None:
        """Waits until a part ends by itself, which none should. Raises why it did."""
        done, _ = await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Says goodbye, lets running calls finish for a while, lets go of everything."""
        await self._health.enter_graceful_shutdown()
        await self._attach_server.close()
        await self._metrics.stop()
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background)
        grace = self._config.grace_seconds
        await asyncio.gather(self._server.stop(grace), self._data_server.close(grace))
        self.holdings.close()


async def serve(config: RelayConfig) -> None:
    """Runs a relay until SIGTERM or SIGINT. Raises `ConfigError` when it cannot listen."""
    stopping = stop_on_signals()
    relay = Relay(config)
    await relay.start()
    announce_listening("relay", "", relay.address, relay.metrics_address)
    waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(relay.failed())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        _log.info("stopping")
        for wait in waits:
            wait.cancel()
        await relay.stop()
    for wait in done:
        wait.result()


def _tls(security: Security, purpose: ssl.Purpose) -> TlsContexts | None:
    return TlsContexts(security, purpose) if security.tls else None


async def _sweep(holdings: Holdings, transfers: Transfers) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        holdings.sweep()
        transfers.states()  # whoever asks for rates seldom gets those of the last seconds, too
