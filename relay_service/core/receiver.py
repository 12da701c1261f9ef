"""Blocks → arena: lands each block in place, verifies it, knows what is missing.

Plain Python. One receiver per rank; blocks may come from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from relay_service.core.beside import Beside
from relay_service.core.copies import Copy
from relay_service.core.digests import block_digest
from relay_service.core.layout import gaps
from relay_service.core.manifest import Manifest
from relay_service.core.ports import Arena, Place
from relay_service.errors import CorruptBlock, InvalidRequest


class Receiver:
    """Fills one rank's arena with the blocks that a manifest promises."""

    def __init__(
        self,
        layout: Manifest,
        arena: Arena,
        verified: Sequence[bytes] | None = None,
        beside: Beside | None = None,
        *,
        unknown: bool = False,
    ) -> None:
        """Takes up where another receiver of this arena ended, given its `verified`.

        Where that is `unknown`, `take_stock` finds it out. What shall land may lie already in
        another arena `beside` this one: such blocks count as verified, and do not come.
        """
        self.layout = layout
        self.bytes_moved = 0
        self.bytes_reread = 0
        self.bytes_landed = 0
        """Bytes of blocks that came, matched and were not there before."""
        self.bytes_copied = 0
        """Bytes of blocks that were copied on this host instead of coming."""
        self.bytes_verified = 0
        self.blocks_verified = 0
        self.blocks_landed = 0
        """Blocks that came and matched, whatever became of them."""
        self.blocks_failed = 0
        """Blocks that came and did not match their digest."""
        self._arena = arena
        self._expected: Manifest | None = None
        self.beside = beside
        self.verified = list(verified or [b""] * layout.block_count)
        """Digest of each block that has landed; empty for a missing one."""
        self._lent: set[int] = set()
        """Blocks that somebody receives in their place."""
        self.unknown = unknown
        """Whether something may lie here of which nobody knows any more."""
        self._lock = threading.Lock()
        self.on_verified: Callable[[], None] = lambda: None
        """Called, from any thread, after a block has become verified."""

    def take_stock(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Digests every block as it lies, for `expect` to keep those that match.

        A pass over the arena, before anything is expected; it ends early when it's `stopped`.
        """
        found: list[bytes] = []
        for index in range(self.layout.block_count):
            if stopped():
                return
            block = self.layout.block(index)
            found.append(block_digest(self._arena.view(block.offset, block.nbytes)))
        self.verified, self.unknown = found, False

    def expect(self, manifest: Manifest) -> int:
        """Names the weights that shall land; returns how many blocks are there already.

        Blocks that landed before with another digest count as missing again.
        """
        self._expected = manifest
        kept = 0
        self.bytes_verified = 0
        for index, digest in enumerate(self.verified):
            wanted = manifest.block_digest(index)
            beside = self.beside.manifest.block_digest(index) if self.beside else b""
            there = bool(wanted) and wanted in (digest, beside)
            self.verified[index] = wanted if there else b""
            kept += there
            self.bytes_verified += manifest.block(index).nbytes * there
        self.blocks_verified = kept
        return kept

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.layout.weight_bytes

    @property
    def missing(self) -> list[int]:
        """Flat indexes of the blocks that are not verified, in order."""
        return [index for index, digest in enumerate(self.verified) if not digest]

    @property
    def complete(self) -> bool:
        """Whether every block is verified."""
        return self._expected is not None and self.blocks_verified == self.layout.block_count

    @contextmanager
    def place(self, blocks: Sequence[int]) -> Iterator[Place | None]:
        """Lends the memory of blocks to one who receives them there.

        None when one of them is verified, or another one receives it in its place.
        """
        if (memory := self._memory_of(blocks)) is None:
            yield None
            return
        with self._lock:
            free = not any(self.verified[index] or index in self._lent for index in blocks)
            if free:
                self._lent.update(blocks)
        try:
            yield Place(memory, partial(self._landed, blocks)) if free else None
        finally:
            if free:
                with self._lock:
                    self._lent.difference_update(blocks)

    def land(self, index: int, data: memoryview) -> None:
        """Lands one block and verifies what landed, in one pass.

        Where another one receives the block in its place, it is left to them. Raises
        `InvalidRequest` for a block of the wrong size, `CorruptBlock` for wrong bytes; then the
        block stays missing.
        """
        if self._expected is None:
            raise InvalidRequest("a block came before its manifest")
        block = self.layout.block(index)
        if len(data) != block.nbytes:
            raise InvalidRequest(f"block {index}: {len(data)} bytes, expected {block.nbytes}")
        if index in self._lent:
            with self._lock:
                self.bytes_moved += block.nbytes
                self.bytes_reread += block.nbytes
            return
        again = bool(self.verified[index])
        with self._lock:  # while it is written over nobody may take it for verified
            self._forget(index, block.nbytes)
        self._landed([index], [self._arena.land(block.offset, data)], again=again)

    def wanted(self, index: int) -> bytes:
        """Returns the digest of the block that shall land there; empty before it is known."""
        return self._expected.block_digest(index) if self._expected else b""

    def copy(self, index: int, data: memoryview) -> bool:
        """Takes a block from elsewhere on this host; returns whether what landed is right.

        A wrong one stays missing. Nobody else may be landing the same block.
        """
        block = self.layout.block(index)
        good = len(data) == block.nbytes and self.wanted(index) == self._arena.land(
            block.offset, data
        )
        if good:
            with self._lock:
                self.bytes_copied += block.nbytes
                self._verify(index, self.wanted(index), block.nbytes)
            self.on_verified()
        return good

    def held(self, index: int) -> bytes:
        """Returns the bytes of a verified block. Raises `EpochChanged` for one that is beside."""
        block, digest = self.layout.block(index), self.verified[index]
        if self.beside and digest == self.beside.manifest.block_digest(index):
            return self.beside.read(index)
        return bytes(self._arena.view(block.offset, block.nbytes))

    def expect_pieces(self, *, keep: bool) -> None:
        """Prepares for weights that come in pieces: keeps the blocks that are whole, or none.

        Then what no piece will fill is cleared.
        """
        self._expected = self.layout  # without digests: no block that came whole would match
        if not keep:
            self.verified = [b""] * self.layout.block_count
            for offset, nbytes in gaps(self.layout):
                self._arena.land(offset, memoryview(bytes(nbytes)))
        there = [index for index, digest in enumerate(self.verified) if digest]
        self.blocks_verified = len(there)
        self.bytes_verified = sum(self.layout.block(index).nbytes for index in there)

    def scatter(self, block: memoryview, pieces: Sequence[Copy]) -> bool:
        """Writes runs of a verified block that lies otherwise; returns whether they are there."""
        return self._arena.scatter(block, pieces)

    def settle(self, index: int) -> None:
        """Takes a block as it lies in the arena: all that belongs there has been written."""
        block = self.layout.block(index)
        digest = block_digest(self._arena.view(block.offset, block.nbytes))
        with self._lock:
            self._verify(index, digest, block.nbytes)

    def manifest(self) -> Manifest:
        """Returns the manifest of what has landed; complete receivers only."""
        return self.layout.with_digests(self.verified)

    def _memory_of(self, blocks: Sequence[int]) -> list[memoryview] | None:
        """Returns where blocks belong; None where nobody but the arena may write."""
        lies = map(self.layout.block, blocks)
        places = (self._arena.place(block.offset, block.nbytes) for block in lies)
        memory = [place for place in places if place is not None]
        return memory if len(memory) == len(blocks) else None

    def _landed(
        self, blocks: Sequence[int], digests: Sequence[bytes], *, again: bool = False
    ) -> None:
        """Takes note of what lies in the place of blocks now. Raises `CorruptBlock`."""
        came = zip(blocks, digests, strict=True)
        with self._lock:
            bad = [index for index, digest in came if not self._count(index, digest, again=again)]
        self.on_verified()
        if bad:
            raise CorruptBlock(self.layout.rank, self.layout.tensor_at(bad[0]), *bad)

    def _count(self, index: int, digest: bytes, *, again: bool) -> bool:
        nbytes, good = self.layout.block(index).nbytes, digest == self.wanted(index)
        self.bytes_moved += nbytes
        self.blocks_landed += good
        self.blocks_failed += not good
        self.bytes_reread += nbytes * (again or not good)
        self.bytes_landed += nbytes * (good and not again)
        if good:
            self._verify(index, digest, nbytes)
        return good

    def _verify(self, index: int, digest: bytes, nbytes: int) -> None:
        if not self.verified[index]:
            self.verified[index] = digest
            self.blocks_verified += 1
            self.bytes_verified += nbytes

    def _forget(self, index: int, nbytes: int) -> None:
        """Counts a block as missing whose good bytes have been written over."""
        if self.verified[index]:
            self.verified[index] = b""
            self.blocks_verified -= 1
            self.bytes_verified -= nbytes
