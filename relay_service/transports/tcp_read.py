"""The reader's end of one connection: receives blocks where they belong.

Plain Python and sockets; all of it runs on a thread of the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from relay_service.core.digests import block_hasher
from relay_service.core.grants import runs_of
from relay_service.core.manifest import BLOCK_BYTES, Manifest
from relay_service.core.ports import Land, LandInPlace, Place
from relay_service.errors import EpochChanged, LeaseEnded, NotYet, RelayError, SourceFailed
from relay_service.transports.tcp_wire import (
    FRAME_BYTES,
    MAGIC,
    REASON_BYTES,
    Frame,
    Kind,
    Wire,
    pack,
    unpack,
)

_KINDS: dict[str, type[RelayError]] = {
    kind.__name__: kind for kind in (EpochChanged, LeaseEnded, NotYet)
}
"""Errors of the source that mean the same here."""


class BlockReader:
    """One connection under one grant."""

    def __init__(self, wire: Wire, epoch: int, manifest: Manifest, land: Land) -> None:
        self._wire = wire
        self._epoch = epoch
        self._manifest = manifest
        self._land = land
        self._in_place = land if isinstance(land, LandInPlace) else None
        self._verdict = bytearray(FRAME_BYTES)
        self._scratch = memoryview(bytearray(0))

    def greet(self, token: bytes) -> None:
        """Shows the grant. Raises `SourceFailed` when it isn't taken."""
        self._wire.send(MAGIC + token)
        frame = self._wire.receive_frame()
        if frame[0] != Kind.WELCOME:
            raise self._failure(frame)

    def read(self, blocks: Sequence[int]) -> None:
        """Receives and lands blocks, in ascending order.

        Raises `SourceFailed`, `EpochChanged` or `LeaseEnded` as the source says, `OSError` when
        it is gone or silent, and whatever landing raises.
        """
        runs = runs_of(blocks)
        self._wire.send(b"".join(pack(Kind.READ, first, count) for first, count in runs))
        for first, count in runs:
            for index in range(first, first + count):
                self._receive(index)

    def leave(self) -> None:
        """Says that nothing more will be asked for."""
        self._wire.send(pack(Kind.DONE))

    def _receive(self, index: int) -> None:
        while (frame := self._wire.receive_frame())[0] == Kind.WAIT:
            pass
        nbytes = self._manifest.block(index).nbytes
        if frame != (Kind.DATA, index, nbytes):
            raise self._failure(frame)
        with self._place(index) as place:
            if place:
                hasher = block_hasher()
                self._receive_data(index, place.memory, hasher.update)
                place.landed(hasher.digest())
            else:
                data = self._elsewhere(nbytes)
                self._receive_data(index, data, lambda _: None)
                self._land(index, data)

    def _receive_data(
        self, index: int, data: memoryview, came: Callable[[memoryview], None]
    ) -> None:
        """Receives a block, each piece of which `came`, and what the source says of it."""
        for piece in self._wire.receive_pieces(data, self._verdict):
            came(piece)
        verdict = unpack(self._verdict)
        if verdict != (Kind.GOOD, index, self._epoch):
            raise self._failure(verdict)

    def _place(self, index: int) -> AbstractContextManager[Place | None]:
        return self._in_place.place(index) if self._in_place else nullcontext()

    def _elsewhere(self, nbytes: int) -> memoryview:
        """Returns a buffer of this connection, for a block that cannot be received in place."""
        if not self._scratch:
            self._scratch = memoryview(bytearray(BLOCK_BYTES))
        return self._scratch[:nbytes]

    def _failure(self, frame: Frame) -> RelayError:
        """Makes the error of a frame that is not the one that should come."""
        kind, nbytes, _ = frame
        if kind != Kind.FAILED or nbytes > REASON_BYTES:
            return SourceFailed("the source broke the protocol of the data port")
        said = bytearray(nbytes)
        self._wire.receive(said)
        name, _, words = said.decode(errors="replace").partition(": ")
        return _KINDS.get(name, SourceFailed)(words)
