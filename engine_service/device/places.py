"""Where what comes of a checkpoint tensor goes: straight into the arena, or to what waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine_service.device.assembly import Assembly
from engine_service.device.formats.block_scaled import Matrix
from engine_service.device.landing import Fill, Landing
from engine_service.device.torch_dtypes import TORCH_DTYPES, bytes_of
from engine_service.device.waiting import WaitingRoom
from relay_service.core.dtypes import DType
from relay_service.core.manifest import TensorEntry

Process = Callable[[Assembly, Matrix], None]


class Place(Protocol):
    """Takes the elements of one tensor's slice."""

    def open(self) -> None:
        """Makes room before anything is taken. Raises `ResourceExhausted`."""

    def write(self, first: int, count: int, fill: Fill) -> None:
        """Takes elements that have not come yet."""

    def complete(self) -> None:
        """Takes note that all have come."""


class Direct:
    """A run of an arena tensor, in whose type the elements are held."""

    def __init__(self, landing: Landing, entry: TensorEntry, dtype: DType, before: int) -> None:
        """`dtype` is the checkpoint's; so many elements of the tensor lie `before`."""
        self._landing, self._entry = landing, entry
        self._dtype, self._before = dtype, before

    def open(self) -> None:
        """Does nothing: the arena is there."""

    def write(self, first: int, count: int, fill: Fill) -> None:
        """Lands elements, converted where the arena holds another type."""
        itemsize = self._entry.dtype.itemsize
        if self._dtype != self._entry.dtype:
            fill = _converted(fill, self._dtype, self._entry.dtype)
        begin = (self._before + first) * itemsize
        self._landing.write(self._entry, begin, count * itemsize, fill)

    def complete(self) -> None:
        """Does nothing: each block is digested with its last byte."""


class Waiting:
    """A part of a matrix that is processed when all of it has come."""

    def __init__(self, assembly: Assembly, name: str, room: WaitingRoom, process: Process) -> None:
        self._assembly, self._name = assembly, name
        self._room, self._process = room, process

    def open(self) -> None:
        """Makes room for the matrix."""
        self._assembly.open(self._room)

    def write(self, first: int, count: int, fill: Fill) -> None:
        """Keeps elements."""
        self._assembly.write(self._name, first, count, fill)

    def complete(self) -> None:
        """Has the matrix processed if this was what it lacked."""
        weight = self._assembly.complete(self._name)
        if weight is not None:
            self._process(self._assembly, weight)


def _converted(fill: Fill, source: DType, target: DType) -> Fill:
    def convert(into: memoryview, done: int) -> None:
        count, before = len(into) // target.itemsize, done // target.itemsize
        raw = torch.empty(count, dtype=TORCH_DTYPES[source])
        fill(bytes_of(raw), before * source.itemsize)
        torch.frombuffer(into, dtype=TORCH_DTYPES[target]).copy_(raw)

    return convert
