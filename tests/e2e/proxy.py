"""A TCP proxy between two services: what passes it can be changed, and it can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

Change = Callable[[bytearray], None]
"""Takes the bytes of one connection in their order, and may change them in place."""


def as_it_is(_: bytearray) -> None:
    """Changes nothing."""


class Proxy:
    """Forwards TCP both ways; what flows to the client passes a change of its own connection."""

    def __init__(self, upstream: str, connection: Callable[[], Change] = lambda: as_it_is) -> None:
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._connection = connection
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Listens and returns the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Resets every connection, as a broken link does; returns how many. New ones may come."""
        cut = len(self._open)
        for writer in list(self._open):
            writer.transport.abort()
        return cut

    def close(self) -> None:
        """Stops listening."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            self._open |= {writer, up_writer}
            await asyncio.gather(
                _pump(reader, up_writer, as_it_is), _pump(up_reader, writer, self._connection())
            )
        self._open -= {writer, up_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change) -> None:
    try:
        while data := bytearray(await reader.read(1 << 16)):
            change(data)
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
