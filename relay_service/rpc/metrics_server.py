"""Serves metrics over HTTP, for either service: `GET /metrics` as Prometheus scrapes it.

Runs on the service's own event loop, so a collector reads its objects between two
steps and needs no locks; with the service's certificates where there are some.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from relay_service.core.security import Security
from relay_service.core.tls_contexts import TlsContexts
from relay_service.errors import ConfigError

MAX_HEAD_BYTES = 16 << 10
REQUEST_SECONDS = 5.0
"""Time that a caller gets for its handshake, and then for its request."""


class MetricsServer:
    """An endpoint with a registry of its own."""

    def __init__(self, listen: str, security: Security) -> None:
        self._listen = listen
        self._security = security
        self._registry = CollectorRegistry(auto_describe=False)
        self._server: asyncio.Server | None = None

    def show(self, collector: Collector) -> None:
        """Shows what a collector finds, from the next scrape on."""
        self._registry.register(collector)

    async def start(self) -> str:
        """Listens; returns the real address, empty when none was asked for.

        Raises `ConfigError` when it cannot listen.
        """
        if not self._listen:
            return ""
        host, _, port = self._listen.rpartition(":")
        context = _context(self._security) if self._security.tls else None
        bare = host.removeprefix("[").removesuffix("]")
        try:
            self._server = await asyncio.start_server(
                self._serve, bare, int(port), limit=MAX_HEAD_BYTES, ssl=context,
                ssl_handshake_timeout=REQUEST_SECONDS if context else None,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._listen}: {error.strerror}", field="metrics_listen"
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stops listening."""
        if self._server:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request per connection."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.decode("latin-1")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever called has left, or was no scraper
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        if rest.split(" ")[0].split("?")[0] != "/metrics":
            return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        encode, content_type = choose_encoder(headers.get("accept", ""))
        body = encode(self._registry)
        return _response("200 OK", content_type, body, with_body=method == "GET")


def _response(status: str, content_type: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")


def _context(security: Security) -> ssl.SSLContext:
    """Returns a context that shows, at every handshake, the certificate that is there by then."""
    contexts = TlsContexts(security, ssl.Purpose.CLIENT_AUTH)

    def choose(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = contexts.fresh()

    context = contexts.fresh()
    context.sni_callback = choose
    return context
