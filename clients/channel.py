"""Opens channels the same way everywhere: options, TLS, and the token of every call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from clients.credentials import NOTHING, Credentials, channel_credentials
from clients.errors import ClientError
from relay_service.core.security import is_loopback

MESSAGE_BYTES = 4 << 20
"""Most that one message may have, at every client and server."""
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Loopback and cluster addresses must not go through an HTTP proxy.
    ("grpc.enable_http_proxy", 0),
    # A peer that was restarted shall be found again within a renewal interval or two.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Despite its name this is how long one attempt may take; a busy host needs it.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Each client has its own connection, so closing one cannot stop another's streams.
    ("grpc.use_local_subchannel_pool", 1),
    # Finds a peer whose host has gone without saying goodbye.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class Channel:
    """A channel whose every call carries the token as it is then.

    Generated stubs take it like gRPC's own. An interceptor would do the same, but stands
    in the way of every message of a stream.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._credentials = credentials
        self._material = credentials.material()
        # A token goes over nobody's network in the clear.
        self._sends_token = self._material is not None or is_loopback(address)
        if self._material is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            secure = channel_credentials(self._material)
            self._channel = grpc.aio.secure_channel(address, secure, options=OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Makes a callable of one request and one response."""
        return self._authorized(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Makes a callable of one request and a stream of responses."""
        return self._authorized(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Makes a callable of a stream of requests and one response."""
        return self._authorized(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Makes a callable of two streams."""
        return self._authorized(self._channel.stream_stream(*args, **kwargs))

    @property
    def is_stale(self) -> bool:
        """Whether other certificates than those that it was opened with are there by now."""
        return self._material is not self._credentials.material()

    async def close(self, grace_seconds: float | None = None) -> None:
        """Closes the channel; calls that run are cancelled after the grace."""
        await self._channel.close(grace_seconds)

    def _authorized(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def authorized(*args: Any, **kwargs: Any) -> Any:
            token = self._credentials.token() if self._sends_token else ""
            if token:
                own = ("authorization", f"Bearer {token}")
                kwargs["metadata"] = (*(kwargs.get("metadata") or ()), own)
            return call(*args, **kwargs)

        return authorized


def open_channel(address: str, credentials: Credentials = NOTHING) -> Channel:
    """Opens a channel to `HOST:PORT`. Connecting happens with the first call."""
    return Channel(address, credentials)


async def streamed(call: Any, address: str) -> AsyncGenerator[Any]:
    """Yields the responses of a call; leaving it cancels the call. Raises `ClientError`."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise ClientError.of(error, address) from error
    finally:
        call.cancel()
