"""Opens channels the same way everywhere."""

from __future__ import annotations

import grpc

_OPTIONS = (
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


def open_channel(address: str) -> grpc.aio.Channel:
    """Opens a channel to `HOST:PORT`. Connecting happens with the first call."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
