"""Holds every weight of a rank in one shared allocation, as torch views.

The relay maps the same memory. Its address never changes: neither sealing nor replacing
what backs it moves a tensor. Where the memory lies is a subclass's affair: `memfd_arena` on
the host, `cuda_arena` on a device.

Beside an arena there may be a shadow of it: memory that holds the same until somebody writes,
of which nobody else knows. New weights are put together there while the arena serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from engine_service.device.torch_dtypes import TORCH_DTYPES
from engine_service.errors import ArenaError
from relay_service.core.digests import block_digest
from relay_service.core.manifest import Block, Manifest, TensorEntry, Unit
from relay_service.memory.host import is_sealed, seal


class _Memory(Protocol):
    """What an arena's memory tells whoever reads it."""

    sequence: int
    """Odd while a commit is applied, and another number after it."""


class Weights(ABC):
    """One rank's weights, wherever they lie: what a checkpoint can be read into."""

    def __init__(self, manifest: Manifest, data: Tensor) -> None:
        """`data` is the memory as `data_bytes` of uint8, no inference tensor: an update writes."""
        self.manifest = manifest
        self._bytes = data
        with torch.inference_mode(mode=False):
            self.tensors: dict[str, Tensor] = {
                entry.name: self._tensor(entry) for unit in manifest.units for entry in unit.tensors
            }

    @abstractmethod
    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns at most a block of the data as bytes of the host, until the next call."""

    @abstractmethod
    def build(self, offset: int, nbytes: int) -> memoryview:
        """Returns bytes of the host in which to build a block that is still zero."""

    @abstractmethod
    def put(self, offset: int, nbytes: int) -> None:
        """Makes what was built last the arena's, at the latest with the next `flush`."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until the memory holds all that was put, and all that torch has written."""

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """Returns bytes where they lie, uint8 `[nbytes]`."""
        return self._bytes[offset : offset + nbytes]

    def digested(self) -> Manifest:
        """Returns the manifest with digests of the current contents: a pass over all bytes."""
        self.flush()
        blocks = map(self.manifest.block, range(self.manifest.block_count))
        digests = [block_digest(self.view(block.offset, block.nbytes)) for block in blocks]
        return self.manifest.with_digests(digests)

    def _tensor(self, entry: TensorEntry) -> Tensor:
        flat = self._bytes[entry.offset : entry.offset + entry.nbytes]
        typed = flat.view(TORCH_DTYPES[entry.dtype])
        return typed.as_strided(entry.shape, entry.strides)


class Shadow(Weights):
    """What an arena holds until somebody writes; nobody but its owner sees what is written."""

    grows: bool
    """Whether it takes memory of the host, as it is written."""

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Memory that it takes beside the arena, measured."""

    @abstractmethod
    def revert(self, block: Block) -> None:
        """Gives back the memory of a block that is what the arena holds, as whole pages."""

    @abstractmethod
    def close(self) -> None:
        """Gives all memory back. Whoever still looked at it would see what serves."""


class Arena(Weights):
    """The weights that a rank serves. Lives as long as the process: views are everywhere."""

    _memory: _Memory
    descriptors: tuple[int, ...]
    """What others map the memory by; the first one carries header and seal."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Address of the first byte of the data."""

    @property
    @abstractmethod
    def page_kind(self) -> str:
        """Says which pages back the memory."""

    def gather_pages(self) -> None:
        """Has the host put the memory into larger pages. Does nothing where it cannot."""

    @abstractmethod
    def shadow(self) -> Shadow:
        """Returns a shadow. Raises `ResourceExhausted`."""

    @abstractmethod
    def take(self, source: Weights, block: Block) -> bytes:
        """Copies a block from where it was put together; returns the digest of what came."""

    @abstractmethod
    def replace_backing(self) -> Manifest:
        """Moves the contents into fresh memory at the same address, and digests them.

        Cuts off every mapping that somebody else still holds of the old memory. Raises
        `ArenaError` where that is impossible.
        """

    @property
    def sealed(self) -> bool:
        """Whether nobody can map the memory for writing any more."""
        return is_sealed(self.descriptors[0])

    def seal(self) -> None:
        """Forbids new writable mappings. Raises `ArenaError` when the kernel did not do it.

        Mappings that exist stay writable: whoever had one must have returned it, or
        `replace_backing` cuts it off.
        """
        self.flush()
        try:
            seal(self.descriptors[0])
        except OSError as error:
            raise ArenaError(f"cannot seal the arena: {error.strerror}") from error
        if not self.sealed:
            raise ArenaError("the arena is not sealed although sealing it succeeded")

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's storage is the arena."""
        return tensor.untyped_storage().data_ptr() == self._bytes.untyped_storage().data_ptr()

    @property
    def sequence(self) -> int:
        """Number that is odd while what lies here is no whole, and another one after it."""
        return self._memory.sequence

    @property
    def whole(self) -> bool:
        """Whether what lies here was committed to the end."""
        return self.sequence % 2 == 0

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Lets readers know that what they read meanwhile, or have read so far, is no whole.

        After an error they are never told otherwise: nobody knows what lies there.
        """
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        """Begins a commit that `end` ends, unless one has begun."""
        if self.whole:
            self._memory.sequence += 1

    def end(self) -> None:
        """Ends a commit."""
        self.flush()
        self._memory.sequence += 1

    def bytes_of(self, unit: Unit) -> Tensor:
        """Returns a unit's bytes where they lie, uint8 `[unit.nbytes]`."""
        return self.bytes_at(unit.offset, unit.nbytes)

    def rename(self, units: Iterable[Unit], rank: int | None = None) -> None:
        """Takes units of the same extents as some that are here, called otherwise.

        With `rank` the arena is that rank's from now on.
        """
        before, renamed = self.manifest, self.manifest.renamed(units)
        number = before.rank if rank is None else rank
        self.manifest = Manifest(number, renamed.data_bytes, renamed.units)
        self.tensors = {
            new.name: self.tensors[old.name]
            for old_unit, new_unit in zip(before.units, self.manifest.units, strict=True)
            for old, new in zip(old_unit.tensors, new_unit.tensors, strict=True)
        }
