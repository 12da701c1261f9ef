"""What guards a gRPC server, of either service: limits, TLS, and the scope of every method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from clients.channel import MESSAGE_BYTES
from clients.credentials import NOTHING, Credentials, server_credentials
from relay_service.core.tokens import TokenFile
from relay_service.errors import ConfigError

Scopes = Mapping[str, frozenset[str]]
"""Method, `/package.Service/Method` → scopes of which a caller needs one."""
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
"""Say nothing that a probe may not know."""
MAX_STREAMS = 1024
"""Most calls at once on one connection; more than any queue admits, so that it can say so."""
_OPTIONS = (
    # Two services on one port would share its calls silently.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # Clients ping while a stream is silent; do not take that for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)
_Code = grpc.StatusCode


def new_server(scopes: Scopes, credentials: Credentials = NOTHING) -> grpc.aio.Server:
    """Makes a server without services; with tokens, its methods want a scope."""
    tokens = credentials.tokens
    interceptors = [_Gatekeeper(scopes, tokens)] if tokens else []
    return grpc.aio.server(interceptors=interceptors, options=_OPTIONS)


def bind(server: grpc.aio.Server, listen: str, credentials: Credentials = NOTHING) -> str:
    """Binds and returns the real address. Raises `ConfigError` when it's taken."""
    try:
        if credentials.tls:
            port = server.add_secure_port(listen, server_credentials(credentials.tls))
        else:
            port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {listen}: the port is in use, or the address is not of this host",
            field="listen",
        ) from error
    return f"{listen.rpartition(':')[0]}:{port}"


class _Gatekeeper(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets a call in whose token has a scope of its method; before its message is read."""

    def __init__(self, scopes: Scopes, tokens: TokenFile) -> None:
        self._scopes = scopes
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a call, or one that refuses it."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_SERVICES):
            return handler
        if refusal := self._refusal(details):
            return _refuse(handler, *refusal)
        return handler

    def _refusal(self, details: grpc.HandlerCallDetails) -> tuple[grpc.StatusCode, str] | None:
        granted = self._tokens.scopes_of(_bearer(details.invocation_metadata))
        if granted is None:
            return _Code.UNAUTHENTICATED, (
                "a token that is known here is needed: `authorization: Bearer TOKEN` "
                "(a client sends its own over TLS or on loopback)"
            )
        needed = self._scopes.get(details.method, frozenset())
        if granted & needed:
            return None
        wanted = " or ".join(sorted(needed)) or "another one"
        return _Code.PERMISSION_DENIED, f"the token lacks the scope: {wanted} is needed"


def _bearer(metadata: Any) -> str:
    values = [value for key, value in metadata or () if key == "authorization"]
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return token if scheme.lower() == "bearer" else ""


def _refuse(handler: Any, code: grpc.StatusCode, message: str) -> Any:
    """Returns a handler of the same kind that reads nothing and refuses."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, message)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)
