"""The source's end of the data port: lets in who shows a grant, and nobody else for long.

Plain Python and sockets. Connections are accepted on the event loop and served on threads.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from relay_service.core.grants import MAX_CONNECTIONS, Grant, Grants
from relay_service.core.holdings import Holdings
from relay_service.core.leases import Lease
from relay_service.core.rate import TokenBucket
from relay_service.core.tls_contexts import TlsContexts
from relay_service.errors import ConfigError, Refused
from relay_service.transports.tcp_connect import cut
from relay_service.transports.tcp_feed import STALL_SECONDS, Feeder, refuse
from relay_service.transports.tcp_wire import HELLO_BYTES, MAGIC, Wire, wrap

HELLO_SECONDS = 5.0
"""Time in which who connects must have shown a grant."""
MAX_STRANGERS = 64
"""Connections that have not shown one yet; when there are more, the oldest is cut."""
NAME = "tcp"
_log = logging.getLogger(__name__)


class DataServer:
    """Listens on the data port of one relay."""

    def __init__(
        self,
        listen: str,
        holdings: Holdings,
        grants: Grants,
        egress: TokenBucket,
        tls: TlsContexts | None = None,
    ) -> None:
        """Binds `HOST:PORT`. Raises `ConfigError` when it cannot."""
        self._holdings = holdings
        self._grants = grants
        self._egress = egress
        self._tls = tls
        self._listener = _bind(listen)
        self.port: int = self._listener.getsockname()[1]
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS + MAX_STRANGERS, "tcp-source")
        self._guests: dict[int, _Guest] = {}
        """All connections by their number, the oldest first."""
        self._closing = threading.Event()

    async def accept(self) -> None:
        """Accepts connections until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        number = 0
        while True:
            await self._called()
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # out of descriptors, or whoever called has left
                _log.warning("no connection could be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            number += 1
            self._make_room()
            self._guests[number] = guest = _Guest(sock)
            guest.ended = self._loop.run_in_executor(self._threads, self._serve, guest)
            guest.ended.add_done_callback(partial(self._left, number))

    async def close(self, grace_seconds: float) -> None:
        """Stops listening, lets readers finish for a while, and waits until nobody reads."""
        self._listener.close()
        if reading := [guest.ended for guest in self._guests.values() if guest.admitted]:
            await asyncio.wait(reading, timeout=grace_seconds)
        self._closing.set()
        guests = list(self._guests.values())
        for guest in guests:
            guest.cut()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.gather(*(guest.ended for guest in guests), return_exceptions=True)

    async def _called(self) -> None:
        """Waits for a caller. `sock_accept` would lose one who comes while it is cancelled."""
        calls = asyncio.Event()
        self._loop.add_reader(self._listener, calls.set)
        try:
            await calls.wait()
        finally:
            self._loop.remove_reader(self._listener)

    def _make_room(self) -> None:
        strangers = [guest for guest in self._guests.values() if not guest.admitted]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].cut()

    def _left(self, number: int, ended: asyncio.Future[None]) -> None:
        self._guests.pop(number).sock.close()
        if not ended.cancelled() and (error := ended.exception()):
            _log.error("a connection failed", exc_info=error)

    def _serve(self, guest: _Guest) -> None:
        """Serves one connection, on a thread of its own."""
        try:
            wire, grant = self._let_in(guest)
        except OSError as error:
            _log.debug("a caller without a grant has left: %s", error)
            return
        if grant is None:
            return
        try:
            guest.admitted = True
            self._feed(wire, grant)
        finally:
            self._grants.release()

    def _feed(self, wire: Wire, grant: Grant) -> None:
        served = self._holdings.leases.served

        def book(held: Lease, nbytes: int) -> None:
            self._loop.call_soon_threadsafe(served, held, NAME, nbytes)

        def arrive(lease: str, rank: int, index: int) -> None:
            arrival = self._holdings.arrival(lease, rank, index)
            asyncio.run_coroutine_threadsafe(arrival, self._loop).result()

        try:
            Feeder(wire, grant, self._holdings, self._egress, book, arrive, self._closing).run()
        except OSError as error:
            _log.debug("a reader left in the middle: %s", error)
            self._loop.call_soon_threadsafe(self._holdings.leases.break_off, grant.lease)

    def _let_in(self, guest: _Guest) -> tuple[Wire, Grant | None]:
        """Hears who it is; no grant for who shows none that is good."""
        if self._tls:
            guest.sock.settimeout(HELLO_SECONDS)
            secured = self._tls.fresh().wrap_socket(
                guest.sock, server_side=True, do_handshake_on_connect=False
            )
            guest.sock = secured
            secured.do_handshake()
        wire, hello = wrap(guest.sock, HELLO_SECONDS), bytearray(HELLO_BYTES)
        wire.receive(hello)
        if not hello.startswith(MAGIC):
            return wire, None
        try:
            grant = self._grants.redeem(bytes(hello[len(MAGIC) :]))
        except Refused as error:
            refuse(wire, error)
            return wire, None
        wire.patience_seconds = STALL_SECONDS
        return wire, grant


class _Guest:
    """A connection."""

    ended: asyncio.Future[None]

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.admitted = False

    def cut(self) -> None:
        """Has its thread hear that it is over."""
        cut(self.sock)


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        family, *_, address = socket.getaddrinfo(
            bare, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=MAX_STRANGERS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {listen}: {error}", field="data_listen") from error
    listener.setblocking(False)
    return listener
