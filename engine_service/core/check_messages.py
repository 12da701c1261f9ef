"""Messages between the front and a rank that check weights; see `messages`."""

from __future__ import annotations

import msgspec

from relay_service.core.manifest import Manifest


class DigestWeights(msgspec.Struct, frozen=True, tag=True):
    """Digests a piece of what lies in the arena, and goes on where it stopped.

    A piece is so small that steps hardly wait for it. Answered by `Digested`.
    """

    begin: bool = False
    """Whether to begin with the first block, whatever was digested before."""


class FoundWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the arena of one rank."""

    manifest: Manifest
    """Of the rank as it is laid out, with digests of what was found."""
    tensors: tuple[bytes, ...]
    """XXH3-128 of each tensor, in the order of the manifest.

    Of the bytes as they lie; where elements lie apart, of the elements in row-major order.
    """
    address: int
    """Of the arena in the rank's process."""
    misplaced: tuple[str, ...] = ()
    """Tensors that a pass does not read where the manifest says that they lie."""


class Digested(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A piece was digested."""

    seconds: float
    """In which the rank could run no step."""
    changed: bool = False
    """Whether the weights are others than those that it began with: it must begin again."""
    found: FoundWeights | None = None
    """With the last piece."""


CheckCommand = DigestWeights
CheckReply = Digested
