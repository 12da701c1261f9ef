"""The relay's gRPC server: scopes, health, reflection."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from clients.credentials import NOTHING, Credentials
from relay_service.rpc import guard
from relay_service.rpc.guard import bind
from seedrelay.v1 import relay_pb2

__all__ = ["SCOPES", "SERVICE", "add_standard_services", "bind", "new_server"]

SERVICE = "seedrelay.v1.RelayService"
_RELAYS, _LOOKERS = frozenset({"relay"}), frozenset({"relay", "control"})
SCOPES = {
    f"/{SERVICE}/GetAttachment": _RELAYS,
    f"/{SERVICE}/Announce": _RELAYS,
    f"/{SERVICE}/ListSources": _LOOKERS,
    f"/{SERVICE}/GetRelayStatus": _LOOKERS,
    f"/{SERVICE}/WatchTransfers": _LOOKERS,
    f"/{SERVICE}/GetManifest": _RELAYS,
    f"/{SERVICE}/GetArtifact": _RELAYS,
    f"/{SERVICE}/AcquireLease": _RELAYS,
    f"/{SERVICE}/RenewLease": _RELAYS,
    f"/{SERVICE}/ReleaseLease": _RELAYS,
    f"/{SERVICE}/GrantRead": _RELAYS,
    f"/{SERVICE}/Pull": _RELAYS,
    f"/{SERVICE}/ReturnMapping": _RELAYS,
    f"/{SERVICE}/ForgetArena": _LOOKERS,
    "/seedrelay.v1.BlockService/ReadBlocks": _RELAYS,
}
"""Scopes of which a caller of each method needs one, where there are tokens.

Engines and other relays come with `relay`, people who look, or give memory back, with `control`.
"""


def new_server(credentials: Credentials = NOTHING) -> grpc.aio.Server:
    """Makes a server without services."""
    return guard.new_server(SCOPES, credentials)


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
