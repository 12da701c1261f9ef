"""Connects to the data port of a relay, over TLS where the service has it. Plain Python."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from concurrent.futures import Executor
from functools import partial

from relay_service.core.tls_contexts import TlsContexts
from relay_service.core.together import in_thread
from relay_service.errors import SourceFailed

Endpoint = tuple[str, int]
"""Host and port."""


def endpoint_of(address: str, relay: str) -> Endpoint:
    """Returns where a data address leads; without a host to that of the relay.

    Raises `SourceFailed` for one that leads nowhere.
    """
    host, _, port = address.rpartition(":")
    host = (host or relay.rpartition(":")[0]).removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 0xFFFF):
        raise SourceFailed(f"{address[:100]!r} is no address of a data port")
    return host, int(port)


async def connect(endpoint: Endpoint, seconds: float) -> socket.socket:
    """Connects. Raises `SourceFailed`."""
    host, port = endpoint
    try:
        async with asyncio.timeout(seconds):
            return await _connect(host, port)
    except TimeoutError:
        raise SourceFailed(f"data port {host}:{port}: not reached in {seconds:g} s") from None
    except OSError as error:
        raise SourceFailed(f"data port {host}:{port}: {error.strerror or error}") from None


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def secure(
    sock: socket.socket, host: str, tls: TlsContexts, seconds: float, threads: Executor
) -> socket.socket:
    """Shakes hands as a client; takes the socket over. Raises `OSError`."""
    sock.settimeout(seconds)
    secured = tls.fresh().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        await in_thread(secured.do_handshake, threads, partial(cut, secured))
    except BaseException:
        secured.close()
        raise
    return secured


def cut(sock: socket.socket) -> None:
    """Has whoever waits on a socket, on any thread, hear that it is over."""
    with contextlib.suppress(OSError):  # it is already
        # The base class's: that of TLS would take away what another thread reads with.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
