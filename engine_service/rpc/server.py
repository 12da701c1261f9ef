"""The engine's gRPC server: scopes, health, reflection, the port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2

from clients.credentials import NOTHING, Credentials
from engine_service.core.lifecycle import Lifecycle
from engine_service.errors import ConfigError
from relay_service import errors as relay_errors
from relay_service.core.instance import State
from relay_service.core.security import Security
from relay_service.rpc import guard

SERVICE = "seedrelay.v1.EngineService"
GATEWAY = "vllm.grpc.engine.VllmEngine"
CONTROL = (
    "PullWeights",
    "SetExpertMap",
    "RecoverExperts",
    "ScaleExperts",
    "PauseGeneration",
    "ContinueGeneration",
    "FlushCache",
    "AbortAll",
    "BeginWeightUpdate",
    "RenewWeightUpdate",
    "StageWeights",
    "PushWeights",
    "CommitWeightUpdate",
    "AbortWeightUpdate",
    "UpdateWeights",
    "SetWeightVersion",
    "CheckWeights",
)
"""Methods that change what an engine does or holds, or look into it."""
SCOPES = {
    **{
        f"/{GATEWAY}/{method}": frozenset({"generate"})
        for method in vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name
    },
    f"/{GATEWAY}/FlushCache": frozenset({"control"}),
    f"/{SERVICE}/Generate": frozenset({"generate"}),
    f"/{SERVICE}/Abort": frozenset({"control", "generate"}),
    f"/{SERVICE}/GetStatus": frozenset({"control", "generate"}),
    f"/{SERVICE}/WatchStatus": frozenset({"control", "generate"}),
    f"/{SERVICE}/GetExpertMap": frozenset({"control", "generate"}),
    f"/{SERVICE}/ListWeightVersions": frozenset({"control", "generate"}),
    **{f"/{SERVICE}/{method}": frozenset({"control"}) for method in CONTROL},
}
"""Scopes of which a caller of each method needs one, where there are tokens."""


@contextmanager
def own_errors() -> Iterator[None]:
    """Makes our own `ConfigError` of the one that shared code raises."""
    try:
        yield
    except relay_errors.ConfigError as error:
        raise ConfigError.of(error) from error


def credentials(security: Security) -> Credentials:
    """Reads certificates and tokens. Raises `ConfigError` for some that cannot be used."""
    with own_errors():
        return Credentials(security, "relay")


def new_server(credentials: Credentials = NOTHING) -> grpc.aio.Server:
    """Makes a server without services."""
    return guard.new_server(SCOPES, credentials)


def bind(server: grpc.aio.Server, listen: str, credentials: Credentials = NOTHING) -> str:
    """Binds and returns the real address. Raises `ConfigError` when it's taken."""
    with own_errors():
        return guard.bind(server, listen, credentials)


def add_standard_services(server: grpc.aio.Server) -> health.aio.HealthServicer:
    """Adds health and reflection."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        [SERVICE, GATEWAY, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return servicer


async def follow(lifecycle: Lifecycle, servicer: health.aio.HealthServicer) -> None:
    """Keeps health true: `""` says alive, the services' names say ready."""
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    async for state in lifecycle.watch():
        answer = health_pb2.HealthCheckResponse
        serving = answer.SERVING if state is State.READY else answer.NOT_SERVING
        for name in (SERVICE, GATEWAY):
            await servicer.set(name, serving)
