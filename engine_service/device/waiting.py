"""Memory for matrices that wait for the rest of their tensors, up to a bound; beyond it, a file."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine_service.device.landing import Fill
from engine_service.device.spill import Spill
from engine_service.device.torch_dtypes import bytes_of
from relay_service.core.manifest import BLOCK_BYTES


class Buffer(Protocol):
    """Room for so many bytes, in memory or on disk."""

    def write(self, first: int, nbytes: int, fill: Fill) -> None:
        """Takes bytes, the first of which is byte `first` of the buffer."""

    def take(self) -> Tensor:
        """Returns all bytes as uint8 and gives the room back."""


class WaitingRoom:
    """Makes buffers, and counts what they hold."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` may wait in memory."""
        self._most_bytes = most_bytes
        self._spill: Spill | None = None
        self.bytes_held = 0
        self.bytes_held_most = 0

    @property
    def bytes_spilled(self) -> int:
        """Size of the file, 0 where none was needed."""
        return self._spill.nbytes if self._spill else 0

    def buffer(self, nbytes: int) -> Buffer:
        """Returns room for so many bytes. Raises `ResourceExhausted` where the disk is full."""
        if self.bytes_held + nbytes <= self._most_bytes:
            return _Held(self, nbytes)
        self._spill = self._spill or Spill()
        return _Spilled(self._spill, nbytes)

    def hold(self, nbytes: int) -> None:
        """Counts bytes that are held from now on, or no more."""
        self.bytes_held += nbytes
        self.bytes_held_most = max(self.bytes_held_most, self.bytes_held)

    def close(self) -> None:
        """Lets go of the file."""
        if self._spill:
            self._spill.close()


class _Held:
    def __init__(self, room: WaitingRoom, nbytes: int) -> None:
        self._room, self._bytes = room, torch.empty(nbytes, dtype=torch.uint8)
        room.hold(nbytes)

    def write(self, first: int, nbytes: int, fill: Fill) -> None:
        fill(bytes_of(self._bytes)[first : first + nbytes], 0)

    def take(self) -> Tensor:
        self._room.hold(-self._bytes.nbytes)
        return self._bytes


class _Spilled:
    def __init__(self, spill: Spill, nbytes: int) -> None:
        self._spill, self._nbytes = spill, nbytes
        self._offset = spill.reserve(nbytes)

    def write(self, first: int, nbytes: int, fill: Fill) -> None:
        for done in range(0, nbytes, BLOCK_BYTES):
            piece = memoryview(bytearray(min(BLOCK_BYTES, nbytes - done)))
            fill(piece, done)
            self._spill.write(self._offset + first + done, piece)

    def take(self) -> Tensor:
        found = torch.empty(self._nbytes, dtype=torch.uint8)
        self._spill.read(self._offset, bytes_of(found))
        self._spill.release(self._offset, self._nbytes)
        return found
