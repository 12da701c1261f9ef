"""Framed messages with file descriptors over a connected Unix socket.

Joins an engine's front to its rank workers, and to the relay of its host. Plain
Python: the frames are opaque bytes. A frame is a 4-byte little-endian length and
that many bytes; descriptors travel with the first byte of their frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable

MAX_FRAME_BYTES = 256 << 20
MAX_DESCRIPTORS = 64
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class ChannelClosed(ConnectionError):
    """The other side has closed the channel, or broke its framing."""


class _Frames:
    """Cuts a byte stream into frames and keeps the descriptors that came along."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: list[int]) -> None:
        self._buffer += data
        self.descriptors.extend(descriptors)
        if len(self.descriptors) > MAX_DESCRIPTORS:
            raise ChannelClosed(f"more than {MAX_DESCRIPTORS} descriptors wait to be taken")

    def next(self) -> bytes | None:
        """Returns the next whole frame. Raises `ChannelClosed` for an oversized one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > MAX_FRAME_BYTES:
            raise ChannelClosed(f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame

    @property
    def pending(self) -> bool:
        return bool(self._buffer)

    def take(self, count: int) -> list[int]:
        if len(self.descriptors) < count:
            raise ChannelClosed(f"{count} descriptors expected")
        return [self.descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popleft())


class BlockingChannel:
    """One end of a channel, for a process that does one thing at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = _Frames()

    def send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends one frame. Raises `ChannelClosed` when nobody reads any more."""
        data = memoryview(_LENGTH.pack(len(frame)) + frame)
        try:
            sent = socket.send_fds(self._sock, [data], list(descriptors))
            # Sending nothing would still fail where the reader, who has it all, has gone.
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> bytes:
        """Waits for the next frame. Raises `ChannelClosed` at the end of the stream."""
        while (frame := self._frames.next()) is None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, _READ_BYTES, MAX_DESCRIPTORS)
            except OSError as error:  # the other side left without reading everything
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other side has closed the channel")
            self._frames.feed(data, descriptors)
        return frame

    def take_descriptors(self, count: int) -> list[int]:
        """Takes the next descriptors, like `AsyncChannel.take_descriptors`."""
        return self._frames.take(count)

    @property
    def waiting(self) -> bool:
        """Whether something has come that was not received, or the stream has ended."""
        if self._frames.pending:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Closes this end; the other side reads the end of the stream."""
        self._sock.close()


class AsyncChannel:
    """One end of a channel, for an event loop. Sends in order, one frame at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = _Frames()
        self._sending = asyncio.Lock()
        self._closed = False
        self._waits: set[Callable[[], None]] = set()

    async def send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends one frame. Raises `ChannelClosed` when nobody reads any more."""
        data = memoryview(_LENGTH.pack(len(frame)) + frame)
        async with self._sending:
            passing = list(descriptors)
            try:
                while data:
                    try:
                        sent = socket.send_fds(self._sock, [data], passing)
                    except BlockingIOError:
                        await self._ready(write=True)
                    else:
                        data, passing = data[sent:], []
            except (OSError, ValueError) as error:
                raise ChannelClosed(str(error)) from error

    async def receive(self) -> bytes:
        """Waits for the next frame. Raises `ChannelClosed` at the end of the stream."""
        while (frame := self._frames.next()) is None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, _READ_BYTES, MAX_DESCRIPTORS)
            except BlockingIOError:
                await self._ready(write=False)
                continue
            except (OSError, ValueError) as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other side has closed the channel")
            self._frames.feed(data, descriptors)
        return frame

    def take_descriptors(self, count: int) -> list[int]:
        """Takes the next descriptors; the caller owns them.

        Raises `ChannelClosed` when fewer came along.
        """
        return self._frames.take(count)

    def drop_descriptors(self) -> None:
        """Closes every descriptor that came along so far and that nobody took."""
        self._frames.close()

    def peer_credentials(self) -> tuple[int, int]:
        """Returns the process id and user id of the other side (unix(7), SO_PEERCRED)."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", raw)
        return pid, uid

    def close(self) -> None:
        """Closes this end and every descriptor that nobody took; whoever waits is woken."""
        if not self._closed:
            self._closed = True
            # The event loop must forget the socket before its number is another's.
            for wake in list(self._waits):
                wake()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._frames.close()

    async def _ready(self, *, write: bool) -> None:
        if self._closed:
            raise ChannelClosed("this side has closed the channel")
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        ready = loop.create_future()
        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if write
            else (loop.add_reader, loop.remove_reader)
        )

        def wake() -> None:
            if wake in self._waits:
                self._waits.discard(wake)
                remove(fd)
            if not ready.done():
                ready.set_result(None)

        self._waits.add(wake)
        add(fd, wake)
        try:
            await ready
        finally:
            wake()
