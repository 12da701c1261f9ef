"""The engine's gRPC server: options, health, reflection, the port."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine_service.core.lifecycle import Lifecycle
from engine_service.errors import ConfigError
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2

SERVICE = "seedrelay.v1.EngineService"
_OPTIONS = (
    # Two engines on one port would share its calls silently.
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


def add_standard_services(server: grpc.aio.Server) -> health.aio.HealthServicer:
    """Adds health and reflection."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [service.full_name for service in engine_pb2.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return servicer


async def follow(lifecycle: Lifecycle, servicer: health.aio.HealthServicer) -> None:
    """Keeps health true: `""` says alive, the service's name says ready."""
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    async for state in lifecycle.watch():
        ready = state is State.READY
        await servicer.set(
            SERVICE,
            health_pb2.HealthCheckResponse.SERVING
            if ready
            else health_pb2.HealthCheckResponse.NOT_SERVING,
        )
