"""Fills a target from ranks that are cut otherwise: each block is read once, and cut up here.

Plain Python. A plan says which bytes of the source's blocks go where. A block is verified
whole, against the source's own digest, before a byte of it is written; then its runs go into
the arenas of all ranks of the target at once. So everything that holds for a copy holds here:
the transports, the epochs, what a wrong byte costs. The price is paid where a target has few
of its ranks on this host: it reads blocks of which it uses a part. Reading ranges instead
would need digests of ranges, of which nobody has any.

A block of the target gets a digest of its own, of what lies in it, when all has come that
belongs there.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from relay_service.core.buffers import Scratch
from relay_service.core.copies import Copy, within
from relay_service.core.digests import block_digest
from relay_service.core.holder import Holder
from relay_service.core.manifest import BLOCK_BYTES, Manifest
from relay_service.core.planner import Planner
from relay_service.core.receiver import Receiver
from relay_service.errors import CorruptBlock, InvalidRequest

_Key = tuple[int, int]
"""Rank and flat index of a block."""
_Piece = tuple[int, Copy]
"""What goes to a rank of the target."""


@dataclass
class Landed:
    """What lies in the arenas of a target that was cut anew; outlives a pull."""

    sources: tuple[Manifest, ...] = ()
    """Manifests of the ranks that it came from. Others have other blocks."""
    blocks: set[_Key] = field(default_factory=set)
    """Blocks of those ranks of which every byte is in its place."""

    def forget(self) -> None:
        """Takes note that other bytes are written over it."""
        self.sources, self.blocks = (), set()


class Recut:
    """The way from all ranks of one source to all ranks of a target."""

    def __init__(
        self, name: str, sources: Sequence[Manifest], receivers: Sequence[Receiver], landed: Landed
    ) -> None:
        """Plans, and takes up what `landed` of just these sources. Takes seconds for large models.

        Raises `FormatMismatch` or `PartsMissing` for what cannot be put together.
        """
        self.bytes_moved = 0
        self.bytes_reread = 0
        self.bytes_landed = 0
        self.blocks_landed = 0
        self.blocks_failed = 0
        self._sources = tuple(sources)
        self._receivers = receivers
        self._landed = landed
        self._lock = threading.Lock()
        self._scratch = Scratch(BLOCK_BYTES)
        planner = Planner([Holder(f"{name} rank {one.rank}", one) for one in sources])
        plans = [
            planner.plan(Holder(f"rank {receiver.layout.rank} of the target", receiver.layout))
            for receiver in receivers
        ]
        self._uses = self._by_block(plans)
        self._awaited = self._count_awaited()
        """By block of the target: how many blocks still have to come before it is whole."""

    def begin(self) -> None:
        """Keeps what landed of the same ranks with the same bytes, and forgets all else."""
        landed = self._landed
        same = landed.sources == self._sources
        if not same:
            landed.forget()
        for receiver in self._receivers:
            receiver.expect_pieces(keep=same)
        landed.sources = self._sources
        for key in landed.blocks:
            self._take_off(self._touched(self._pieces(key)))
        for target, receiver in enumerate(self._receivers):
            for block in receiver.missing:
                if not self._awaited.get((target, block)):
                    receiver.settle(block)

    @property
    def ranks(self) -> range:
        """Ranks to read from."""
        return range(len(self._sources))

    @property
    def bytes_kept(self) -> int:
        """Bytes of the source's blocks that need not be read any more."""
        return sum(self._sources[rank].block(index).nbytes for rank, index in self._landed.blocks)

    def missing(self, rank: int) -> list[int]:
        """Flat indexes of the blocks of a rank that are needed and have not come, in order."""
        keys = self._uses.keys() - self._landed.blocks
        return sorted(index for source, index in keys if source == rank)

    def unit(self, rank: int, index: int) -> int:
        """Returns the index of the unit that a block of a rank belongs to."""
        return self._sources[rank].block(index).unit

    def place(self, rank: int, blocks: Sequence[int]) -> AbstractContextManager[None]:
        """Lends nothing: of a block the target has its parts, in many places."""
        del rank, blocks
        return nullcontext()

    def land(self, rank: int, index: int, data: memoryview) -> None:
        """Verifies one block and writes what the target needs of it. From any thread.

        Raises `InvalidRequest` for a block of the wrong size, `CorruptBlock` for wrong bytes
        and for what isn't there when it was written.
        """
        manifest = self._sources[rank]
        if len(data) != manifest.block(index).nbytes:
            raise InvalidRequest(f"block {index}: {len(data)} bytes")
        # A copy of our own: a source may be written to between the digest and the cutting.
        block = self._scratch.copy(data)
        pieces = list(self._pieces((rank, index)))
        good = block_digest(block) == manifest.block_digest(index) and self._write(block, pieces)
        touched = self._touched(pieces)
        with self._lock:
            whole = self._count(rank, index, touched, good=good)
        for target, number in whole:
            self._receivers[target].settle(number)
        if not good:
            raise CorruptBlock(rank, manifest.tensor_at(index), index)

    def _write(self, block: memoryview, pieces: list[_Piece]) -> bool:
        """Writes the runs of a block into every arena; returns whether they are there."""
        by_target = defaultdict(list)
        for target, piece in pieces:
            by_target[target].append(piece)
        return all(self._receivers[t].scatter(block, mine) for t, mine in by_target.items())

    def _count(self, rank: int, index: int, touched: set[_Key], *, good: bool) -> list[_Key]:
        """Books a block that came; returns the blocks of the target that are whole with it."""
        key, nbytes = (rank, index), self._sources[rank].block(index).nbytes
        self.bytes_moved += nbytes
        self.blocks_landed += good
        if not good or key in self._landed.blocks:
            self.blocks_failed += not good
            self.bytes_reread += nbytes
            return []
        self.bytes_landed += nbytes
        self._landed.blocks.add(key)
        return self._take_off(touched)

    def _take_off(self, touched: set[_Key]) -> list[_Key]:
        whole = []
        for one in touched:
            self._awaited[one] -= 1
            if not self._awaited[one]:
                whole.append(one)
        return whole

    def _by_block(self, plans: list[tuple[Copy, ...]]) -> dict[_Key, list[_Piece]]:
        """Lists by block of the source what is taken from it, and for which rank."""
        uses: defaultdict[_Key, list[_Piece]] = defaultdict(list)
        for target, plan in enumerate(plans):
            for copy in plan:
                span = copy.source_offset, copy.source_span
                for index in self._sources[copy.source].blocks_at(*span):
                    uses[copy.source, index].append((target, copy))
        return dict(uses)

    def _pieces(self, key: _Key) -> Iterator[_Piece]:
        """Yields what of one block goes where, with offsets from the start of the block."""
        rank, index = key
        block = self._sources[rank].block(index)
        for target, copy in self._uses[key]:
            for piece in within(copy, block.offset, block.offset + block.nbytes):
                yield target, piece

    def _touched(self, pieces: Iterable[_Piece]) -> set[_Key]:
        """Returns the blocks of the target that pieces of one block go to."""
        return {
            (target, number)
            for target, piece in pieces
            for number in self._receivers[target].layout.blocks_at(
                piece.target_offset, piece.target_span
            )
        }

    def _count_awaited(self) -> dict[_Key, int]:
        awaited: defaultdict[_Key, int] = defaultdict(int)
        for key in self._uses:
            for one in self._touched(self._pieces(key)):
                awaited[one] += 1
        return dict(awaited)
