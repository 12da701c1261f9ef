"""Tensors that somebody pushes: announced all at once, then in pieces of any size and order.

A tensor that was announced with a digest is the exception: its pieces come from its first
byte on, since it is digested as they come.

A head beside tied embeddings cannot be compared before it has come. It is held back, and
compared with the embedding, as this rank holds it, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from engine_service.core.covered import Covered
from engine_service.core.update_messages import PushedHeader, StagePiece
from engine_service.device.arena import Weights
from engine_service.device.checkpoint import TensorHeader
from engine_service.device.intake import Filled, Intake
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.device.parts import Part
from engine_service.device.sharding import Slice
from engine_service.device.torch_dtypes import TORCH_DTYPES, bytes_of
from engine_service.device.waiting import Buffer
from engine_service.errors import CheckpointError
from relay_service.core.digests import block_hasher
from relay_service.core.dtypes import DType
from relay_service.core.manifest import DIGEST_BYTES

Prepare = Callable[[Mapping[str, TensorHeader], Callable[[], bool]], Intake]
"""Checks headers and makes what takes their tensors; a head and an embedding are compared by
what is given."""


class Pushed:
    """What is being pushed."""

    def __init__(
        self, tensors: Sequence[PushedHeader], prepare: Prepare, slices: Mapping[str, Slice]
    ) -> None:
        """Checks all headers; changes nothing yet. Raises `CheckpointError`."""
        headers: dict[str, TensorHeader] = {}
        for one in tensors:
            if one.name in headers:
                raise CheckpointError(f"{one.name} is announced twice", tensor=one.name)
            if len(one.digest) not in (0, DIGEST_BYTES):
                raise CheckpointError(f"{one.name}: a digest is 16 bytes", tensor=one.name)
            headers[one.name] = TensorHeader(one.name, "push", one.dtype, one.shape)
        self.headers = headers
        self._tensors = tensors
        self._hashers = {
            index: _Hasher(one) for index, one in enumerate(tensors) if one.digest
        }  # fmt: skip
        self.intake = prepare(headers, lambda: True)
        self._head: _Head | None = None
        if HEAD in headers and HEAD not in slices:
            self._head = _Head(Part(headers[HEAD], slices[EMBEDDING]), self.intake)

    def add(self, piece: StagePiece) -> None:
        """Takes a piece. One that is refused has changed nothing, unless it is the digest.

        Raises `CheckpointError` for a piece that is no part of what was announced, and where
        a whole tensor has another digest; `ResourceExhausted`.
        """
        if not 0 <= piece.tensor < len(self._tensors):
            raise CheckpointError(
                f"there is no tensor {piece.tensor}: {len(self._tensors)} were announced"
            )
        one, hasher = self._tensors[piece.tensor], self._hashers.get(piece.tensor)
        if hasher:
            hasher.check(piece)
        if one.name == HEAD and self._head:
            self._head.add(*_elements(self._head.part, piece))
        elif part := self.intake.collector.parts.get(one.name):
            self.intake.collector.add(one.name, *_elements(part, piece))
        if hasher:
            hasher.add(piece)

    def finish(self, computed: Mapping[str, torch.Tensor], weights: Weights) -> Filled:
        """Raises `CheckpointError` naming what has not come, or is not what it should be."""
        for hasher in self._hashers.values():
            hasher.finish()
        if self._head and not self._head.covered.complete:
            raise CheckpointError(
                f"incomplete tensors: {HEAD} lacks {self._head.covered.missing} elements",
                tensor=HEAD,
            )
        filled = self.intake.finish(computed)
        if self._head:
            self._head.check(weights)
        return filled

    def close(self) -> None:
        """Lets go of what waits."""
        self.intake.close()


class _Hasher:
    """Digests one tensor from its first byte on."""

    def __init__(self, tensor: PushedHeader) -> None:
        self._tensor = tensor
        self._hasher: xxhash.xxh3_128 = block_hasher()
        self._next = 0
        self._nbytes = _bytes_of(tensor)

    def check(self, piece: StagePiece) -> None:
        """Raises `CheckpointError` for a piece out of order, or beyond the end."""
        name = self._tensor.name
        if piece.offset != self._next:
            raise CheckpointError(
                f"{name} carries a digest, so its pieces come in order: byte {self._next} is next, "
                f"not {piece.offset}",
                tensor=name, expected=str(self._next), found=str(piece.offset),
                hint="send pieces of this tensor in order, or announce it without a digest",
            )  # fmt: skip
        if self._next + len(piece.data) > self._nbytes:
            raise CheckpointError(f"{name} has {self._nbytes} bytes", tensor=name)

    def add(self, piece: StagePiece) -> None:
        """Takes a piece; raises `CheckpointError` where the whole is not what was announced."""
        self._hasher.update(piece.data)
        self._next += len(piece.data)
        if self._next == self._nbytes:
            self.finish()

    def finish(self) -> None:
        """Raises `CheckpointError` unless all has come, and is what was announced."""
        name, expected = self._tensor.name, self._tensor.digest.hex()
        if self._next < self._nbytes:
            raise CheckpointError(
                f"incomplete tensors: {name} lacks {self._nbytes - self._next} bytes", tensor=name
            )
        if self._hasher.hexdigest() != expected:
            raise CheckpointError(
                f"{name} has arrived with other bytes than were announced",
                tensor=name, expected=expected, found=self._hasher.hexdigest(),
            )  # fmt: skip


class _Head:
    """A head that must be the embedding; it waits until both have come."""

    def __init__(self, part: Part, intake: Intake) -> None:
        self.part = part
        self.covered = Covered(part.slice.elements)
        self._room = intake.collector.room
        self._buffer: Buffer | None = None

    def add(self, first: int, data: bytes) -> None:
        """Takes elements of the whole tensor."""
        itemsize, piece = self.part.dtype.itemsize, memoryview(data)
        if first + len(data) // itemsize > math.prod(self.part.slice.whole):
            raise CheckpointError(f"{HEAD}: {len(data)} bytes are beyond its end", tensor=HEAD)
        for start, held in self.part.cut(first, piece):
            count = len(held) // itemsize
            if self.covered.overlaps(start, start + count):
                raise CheckpointError(f"{HEAD}: a part of it has come twice", tensor=HEAD)

            self._buffer = self._buffer or self._room.buffer(self.part.nbytes)

            def copy(into: memoryview, done: int, held: memoryview = held) -> None:
                into[:] = held[done : done + len(into)]

            self._buffer.write(start * itemsize, len(held), copy)
            self.covered.add(start, start + count)

    def check(self, weights: Weights) -> None:
        """Raises `CheckpointError` where the arena's embedding is another one."""
        embedding = weights.tensors["embed"].cpu()
        held = self._buffer.take() if self._buffer else torch.empty(0, dtype=torch.uint8)
        head, self._buffer = held.view(TORCH_DTYPES[self.part.dtype]), None
        if bytes_of(head.to(embedding.dtype)) != bytes_of(embedding):
            raise CheckpointError(
                f"{HEAD} differs from {EMBEDDING}, but the configuration ties them "
                "(tie_word_embeddings)",
                tensor=HEAD,
            )


def _elements(part: Part, piece: StagePiece) -> tuple[int, bytes]:
    """Returns the first element of a piece, and its bytes."""
    itemsize = part.dtype.itemsize
    if piece.offset < 0 or piece.offset % itemsize or len(piece.data) % itemsize:
        raise CheckpointError(
            f"{part.header.name}: {len(piece.data)} bytes from byte {piece.offset} are no whole "
            f"number of its elements of {itemsize} bytes",
            tensor=part.header.name,
        )
    return piece.offset // itemsize, piece.data


def _bytes_of(tensor: PushedHeader) -> int:
    try:
        itemsize = DType(tensor.dtype.lower()).itemsize
    except ValueError as error:
        raise CheckpointError(
            f"{tensor.name} has dtype {tensor.dtype}, which is not known", tensor=tensor.name
        ) from error
    return math.prod(tensor.shape) * itemsize
