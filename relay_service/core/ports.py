"""What the core needs of the rings around it. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from relay_service.core.copies import Copy
from relay_service.core.instance import Instance
from relay_service.core.manifest import Manifest
from relay_service.core.rate import TokenBucket

Land = Callable[[int, memoryview], None]
"""Takes a block: flat index and bytes. May be called from any thread.

Raises `CorruptBlock` when the bytes are wrong.
"""


@dataclass(frozen=True)
class Place:
    """The memory where some blocks belong, lent to one who receives them there."""

    memory: Sequence[memoryview]
    """Of each block."""
    landed: Callable[[Sequence[bytes]], None]
    """Takes the digest of what lies in each now, made while it was in cache.

    Raises `CorruptBlock` for the first that should be another one; the others have landed. What
    was not said to have landed counts for nothing.
    """


@runtime_checkable
class LandInPlace(Protocol):
    """A `Land` that also lends the memory where blocks belong, to receive them there."""

    def __call__(self, index: int, data: memoryview, /) -> None:
        """Takes a block from elsewhere."""

    def place(self, blocks: Sequence[int]) -> AbstractContextManager[Place | None]:
        """Lends the memory of blocks for one attempt to receive them.

        None where one of them can only be landed from elsewhere.
        """


class Arena(Protocol):
    """A mapping of one rank's arena."""

    @property
    def sequence(self) -> int:
        """Number that is odd while a commit is applied and changes with each one."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns at most a block of the data, as bytes of the host.

        Valid until the same thread calls again, or until `close`.
        """

    def place(self, offset: int, nbytes: int) -> memoryview | None:
        """Returns writable memory of the data to receive into; None where only `land` writes."""

    def land(self, offset: int, data: memoryview) -> bytes:
        """Copies a block in and returns the digest of what landed, in one pass."""

    def scatter(self, block: memoryview, pieces: Sequence[Copy]) -> bool:
        """Copies runs in, their source offsets from the start of `block`, and waits for them.

        Returns whether what lies there now is what was copied.
        """

    def check_header(self) -> None:
        """Raises `ManifestError` when the memory isn't an arena of this size."""

    def close(self) -> None:
        """Unmaps. Doing so twice is harmless."""


class MapArena(Protocol):
    """Maps the arena behind its descriptors, which stay open and the caller's."""

    def __call__(
        self, descriptors: Sequence[int], data_bytes: int, *, writable: bool, sparse: bool = False
    ) -> Arena:
        """Maps. Raises `ManifestError`, `Refused`, `ResourceExhausted` or `DeviceError`.

        Sparse memory is allocated as it is written: `land` and `scatter` raise
        `ResourceExhausted` when there is none left.
        """


class SourceSession(Protocol):
    """An open source: a lease on its weights, and a way to its blocks."""

    @property
    def upstream(self) -> Sequence[str]:
        """Names everyone whom an incomplete source is filled from."""

    async def manifest(self, rank: int, holder: Instance | None = None) -> Manifest:
        """Returns the manifest of one rank, from whoever is said to hold the same one.

        Its digest says whether it is the one. It comes from the source where that one has none.
        """

    async def read(self, rank: int, blocks: Sequence[int], land: Land, limit: TokenBucket) -> None:
        """Reads blocks and lands each one, at most as fast as `limit` allows.

        Returns when all have landed. Raises `SourceFailed` when the source dies
        or stalls, `EpochChanged` or `LeaseEnded` when its weights are others by
        now, `NotYet` when an incomplete one lacks a block for a second, and
        whatever `land` raises.
        """

    async def probe(self) -> bytes:
        """Returns the probe that the source recorded; empty where it has none."""

    async def close(self) -> None:
        """Gives the lease back."""


class Transport(Protocol):
    """One way to move blocks from a source into an arena of this host."""

    name: str

    async def unusable(self, source: Instance) -> str:
        """Probes the way to a source. Says why it can't be used; empty if it can."""

    async def open(self, source: Instance, holder: str, *, yields: bool = False) -> SourceSession:
        """Takes a lease for `holder`. Raises `SourceFailed`, `Refused` or `NotYet`.

        Where `yields`, a source with readers enough raises `SourceBusy`.
        """


class Fleet(Protocol):
    """Everyone who is known to hold weights."""

    address: str
    """Of this host's relay."""

    @property
    def missing(self) -> str:
        """Who did not answer when everyone was asked last; empty when nobody was missed."""

    async def instances(self) -> list[Instance]:
        """Lists every known instance, this host's and the directory's."""

    def announce_soon(self) -> None:
        """Lets others know at once what has changed on this host."""
