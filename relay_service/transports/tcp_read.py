"""The reader's end of one connection: receives blocks where they belong.

Plain Python and sockets; all of it runs on a thread of the reader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

from relay_service.core.digests import block_hasher
from relay_service.core.grants import Run, runs_of
from relay_service.core.manifest import Manifest
from relay_service.core.ports import Land, LandInPlace, Place
from relay_service.errors import EpochChanged, LeaseEnded, NotYet, RelayError, SourceFailed
from relay_service.transports.tcp_wire import (
    FRAME_BYTES,
    MAGIC,
    REASON_BYTES,
    RUN_BLOCKS,
    Frame,
    Kind,
    Wire,
    pack,
    unpack,
)

RUNS_AT_ONCE = 64
"""What is asked for at a time, or both ends might wait for each other to receive."""
_KINDS: dict[str, type[RelayError]] = {
    kind.__name__: kind for kind in (EpochChanged, LeaseEnded, NotYet)
}
"""Errors of the source that mean the same here."""


class BlockReader:
    """One connection under one grant."""

    def __init__(
        self, wire: Wire, token: bytes, epoch: int, manifest: Manifest, land: Land
    ) -> None:
        """Takes a connection on which nothing has been said yet, and the token of the grant."""
        self._wire = wire
        self._epoch = epoch
        self._manifest = manifest
        self._land = land
        self._in_place = land if isinstance(land, LandInPlace) else None
        self._verdict = bytearray(FRAME_BYTES)
        self._scratch = memoryview(bytearray(0))
        self._hello = MAGIC + token
        """The grant, until it has been shown."""
        wire.widen()

    def read(self, blocks: Sequence[int], *, last: bool = False) -> None:
        """Receives and lands blocks, in ascending order; says so when they are the last.

        Raises `SourceFailed`, also where the grant isn't taken, `EpochChanged` or `LeaseEnded` as
        the source says, `OSError` when it is gone or silent, and whatever landing raises.
        """
        runs = runs_of(blocks)
        for at in range(0, len(runs), RUNS_AT_ONCE):
            self._read_runs(runs[at : at + RUNS_AT_ONCE])
        if last:
            self._wire.send(pack(Kind.DONE))

    def _read_runs(self, runs: Sequence[Run]) -> None:
        # Who shows a grant asks at once: that it is taken is heard before the first block.
        hello, self._hello = self._hello, b""
        self._wire.send(hello + b"".join(pack(Kind.READ, first, count) for first, count in runs))
        if hello and (frame := self._wire.receive_frame())[0] != Kind.WELCOME:
            raise self._failure(frame)
        for first, count in runs:
            asked = range(first, first + count)
            while asked:
                asked = asked[self._receive(asked) :]

    def _receive(self, asked: range) -> int:
        """Receives and lands the first of the blocks that were asked for; returns how many."""
        while (frame := self._wire.receive_frame())[0] == Kind.WAIT:
            pass
        kind, first, count = frame
        most = min(len(asked), RUN_BLOCKS)
        if kind != Kind.DATA or first != asked[0] or not 1 <= count <= most:
            raise self._failure(frame)
        blocks = asked[:count]
        with self._place(blocks) as place:
            if place:
                hashers = [block_hasher() for _ in blocks]
                for number, piece in self._wire.receive_pieces(place.memory, self._verdict):
                    hashers[number].update(piece)
                self._check_verdict(first)
                place.landed([hasher.digest() for hasher in hashers])
            else:
                self._receive_elsewhere(blocks)
        return count

    def _receive_elsewhere(self, blocks: Sequence[int]) -> None:
        """Receives blocks into a buffer of this connection, and lands them out of it."""
        sizes = [self._manifest.block(index).nbytes for index in blocks]
        if len(self._scratch) < sum(sizes):
            self._scratch = memoryview(bytearray(sum(sizes)))
        ends = list(accumulate(sizes))
        parts = [self._scratch[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        for _ in self._wire.receive_pieces(parts, self._verdict):
            pass
        self._check_verdict(blocks[0])
        for index, part in zip(blocks, parts, strict=True):
            self._land(index, part)

    def _check_verdict(self, first: int) -> None:
        verdict = unpack(self._verdict)
        if verdict != (Kind.GOOD, first, self._epoch):
            raise self._failure(verdict)

    def _place(self, blocks: Sequence[int]) -> AbstractContextManager[Place | None]:
        return self._in_place.place(blocks) if self._in_place else nullcontext()

    def _failure(self, frame: Frame) -> RelayError:
        """Makes the error of a frame that is not the one that should come."""
        kind, nbytes, _ = frame
        if kind != Kind.FAILED or nbytes > REASON_BYTES:
            return SourceFailed("the source broke the protocol of the data port")
        said = bytearray(nbytes)
        self._wire.receive(said)
        name, _, words = said.decode(errors="replace").partition(": ")
        return _KINDS.get(name, SourceFailed)(words)
