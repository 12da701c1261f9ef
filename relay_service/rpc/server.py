"""The relay's gRPC server: options, health, reflection, the port."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from relay_service.errors import ConfigError
from seedrelay.v1 import relay_pb2

SERVICE = "seedrelay.v1.RelayService"
_OPTIONS = (
    # Two relays on one port would share its calls silently.
    ("grpc.so_reuseport", 0),
    # Clients ping while a stream is silent; do not take that for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


def new_server() -> grpc.aio.Server:
    """Makes a server without services."""
    return grpc.aio.server(options=_OPTIONS)


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Binds and returns the real address. Raises `ConfigError` when it's taken."""
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {listen}: the port is in use or not ours", field="listen"
        ) from error
    return f"{listen.rpartition(':')[0]}:{port}"


async def add_standard_services(server: grpc.aio.Server) -> health.aio.HealthServicer:
    """Adds health (all serving) and reflection."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", SERVICE):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    names = [service.full_name for service in relay_pb2.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return servicer
