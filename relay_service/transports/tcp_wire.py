"""Frames on a socket, and sockets that wait for a peer no longer than they must. Plain Python.

A reader shows its grant (`MAGIC` and the token), asks for runs of blocks, `READ first count`, as
many as it likes, and is told `WELCOME` before the first comes. They come in runs of what is
there, as long as the source finds good, of `RUN_BLOCKS` at most: `DATA first count`, the bytes
of these blocks one after another, and `GOOD first epoch` once they are known not to have
changed meanwhile. Where either cannot be, `FAILED` comes instead, with the reason, and is the
last. `WAIT` says that the source waits
itself. Who leaves without `DONE` may have died: its lease ends soon. All numbers are
little-endian. Nothing here is as long as a peer says: a reader knows how long each block is,
and a reason has a limit.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from relay_service.core.grants import TOKEN_BYTES
from relay_service.transports.tcp_connect import cut

MAGIC = b"SEEDTCP3"
HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
REASON_BYTES = 1024
RUN_BLOCKS = 16
"""Most blocks under one verdict. It costs both ends as much as a good part of a block."""
STEP_SECONDS = 1.0
"""Longest that a call waits. A process that was stopped itself finds one step gone when it
wakes, and hears what came meanwhile before it blames anybody."""
PIECE_BYTES = 256 << 10
"""What is received at a time: small enough to be in cache still when it is digested."""
WINDOW_BYTES = 8 << 20
"""What may be on its way to a reader from the first block on, as far as its host allows."""
_LAST_READS = 16
_FRAME = struct.Struct("<I4xQQ")
FRAME_BYTES = _FRAME.size


class Kind(enum.IntEnum):
    """What a frame says."""

    WELCOME = 1
    READ = 2
    DATA = 3
    GOOD = 4
    WAIT = 5
    FAILED = 6
    DONE = 7


_Bytes = bytes | bytearray | memoryview
_Some = Callable[[Sequence[_Bytes]], int]
Frame = tuple[int, int, int]
"""Kind and its two numbers; of `FAILED` the length of its reason."""


def pack(kind: Kind, first: int = 0, second: int = 0) -> bytes:
    """Returns a frame."""
    return _FRAME.pack(kind, first, second)


def unpack(data: bytes | bytearray | memoryview) -> Frame:
    """Reads a frame; its kind may be none that there is."""
    kind, first, second = _FRAME.unpack(data)
    return kind, first, second


class Wire:
    """A connected socket, for one thread at a time; any thread may `interrupt`."""

    def __init__(self, sock: socket.socket, patience_seconds: float) -> None:
        """Takes the socket over."""
        self._sock = sock
        self.patience_seconds = patience_seconds
        self._frame = bytearray(FRAME_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._bound_waits()

    def widen(self) -> None:
        """Has the kernel take in much at once: by itself it begins with an eighth of a block.

        Its buffer grows to what somebody says to wait for (tcp(7), SO_RCVLOWAT), up to half of
        `net.ipv4.tcp_rmem`, and stays as large. Asked for as SO_RCVBUF it would never grow again.
        """
        for nbytes in (WINDOW_BYTES, 1):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def send(self, *parts: bytes | memoryview) -> None:
        """Sends all parts.

        Raises `ConnectionError` when the peer has gone, `TimeoutError` when it takes too long.
        """
        self._pass(parts, self._send_some)

    def receive(self, *parts: bytearray | memoryview) -> None:
        """Fills all parts. Raises what `send` does."""
        self._pass(parts, self._receive_some)

    def receive_pieces(
        self, parts: Sequence[memoryview], after: bytearray | memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """Fills `parts` and what comes `after` them.

        Yields each piece when it is there, and of which part it is. Raises what `send` does.
        """
        *most, (number, last) = [
            (number, part[at : at + PIECE_BYTES])
            for number, part in enumerate(parts)
            for at in range(0, len(part), PIECE_BYTES)
        ]
        # Being woken costs both ends more than the bytes that one is woken for. Never more than
        # what still comes for certain: the last piece is waited for with nothing behind it.
        self._wake_at(len(last))
        for piece in most:
            self.receive(piece[1])
            yield piece
        self._wake_at(1)
        self.receive(last, after)
        yield number, last

    def receive_frame(self) -> Frame:
        """Receives one frame."""
        self.receive(self._frame)
        return unpack(self._frame)

    def send_last(self, data: bytes) -> None:
        """Sends the last that there is to say, and waits a moment until the peer has left.

        What it has said meanwhile, unread, would make the kernel drop what we said.
        """
        self.send(data)
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        rest = memoryview(bytearray(FRAME_BYTES * 1024))
        with contextlib.suppress(OSError):
            for _ in range(_LAST_READS):
                if not self._receive_some([rest]):
                    break

    def interrupt(self) -> None:
        """Ends the connection both ways: whoever waits on it hears that it was lost."""
        cut(self._sock)

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()

    def _pass(self, parts: Sequence[_Bytes], some: _Some) -> None:
        waited, left = 0.0, sum(map(len, parts))
        while left:
            began = time.monotonic()
            try:
                count = some(parts)
            except (BlockingIOError, TimeoutError):
                count = 0
            else:
                if not count:
                    raise ConnectionResetError("the connection was lost")
            left -= count
            if not left:
                return
            parts = _rest(parts, count)
            waited += min(time.monotonic() - began, STEP_SECONDS)
            if waited >= self.patience_seconds:
                raise TimeoutError(f"silent for {self.patience_seconds:g} s")

    def _bound_waits(self) -> None:
        # By the kernel, not by `settimeout`: that would poll before each call, and would not
        # let one call wait until all is there.
        self._sock.settimeout(None)
        step = min(STEP_SECONDS, self.patience_seconds)
        bound = struct.pack("ll", int(step), int(step % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, bound)

    def _wake_at(self, nbytes: int) -> None:
        """Has the kernel wake whoever receives only when so many bytes are there."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _send_some(self, parts: Sequence[_Bytes]) -> int:
        return self._sock.sendmsg(parts)

    def _receive_some(self, parts: Sequence[_Bytes]) -> int:
        return self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]


class TlsWire(Wire):
    """The same over TLS, which gathers and scatters nothing."""

    def __init__(self, sock: ssl.SSLSocket, patience_seconds: float) -> None:
        super().__init__(sock, patience_seconds)
        self._tls = sock

    def _bound_waits(self) -> None:
        self._sock.settimeout(min(STEP_SECONDS, self.patience_seconds))

    def _wake_at(self, nbytes: int) -> None:
        """Does nothing: what the kernel has is not what there is to read."""

    def _send_some(self, parts: Sequence[_Bytes]) -> int:
        return self._tls.send(parts[0])

    def _receive_some(self, parts: Sequence[_Bytes]) -> int:
        return self._tls.recv_into(parts[0])


def wrap(sock: socket.socket, patience_seconds: float) -> Wire:
    """Returns a wire of a connected socket, with or without TLS."""
    if isinstance(sock, ssl.SSLSocket):
        return TlsWire(sock, patience_seconds)
    return Wire(sock, patience_seconds)


def _rest(parts: Sequence[_Bytes], count: int) -> list[_Bytes]:
    """Returns what is left of parts after so many bytes."""
    left: list[_Bytes] = []
    for part in parts:
        done = min(count, len(part))
        count -= done
        if done < len(part):
            left.append(memoryview(part)[done:])
    return left
