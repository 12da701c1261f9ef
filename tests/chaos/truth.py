"""What the weights of a run are, by version, and whether an arena holds them."""

from __future__ import annotations

import os
import random
from pathlib import Path

from benchmarks.fanout_relays import layout
from relay_service.core.digests import block_digest
from relay_service.core.manifest import BLOCK_BYTES, HEADER_BYTES, Manifest, weights_digest
from tests.chaos.plan import BLOCKS, Plan

LAYOUT = layout(BLOCKS)
VERSIONS = ("v1", "v2")


def contents(plan: Plan, version: str) -> bytes:
    """Returns the weights of a version: the second one differs in the blocks that change."""
    first = random.Random(plan.seed).randbytes(LAYOUT.data_bytes)  # noqa: S311
    if version == VERSIONS[0]:
        return first
    blocks = [first[at : at + BLOCK_BYTES] for at in range(0, len(first), BLOCK_BYTES)]
    return b"".join(b[::-1] if n in plan.changed else b for n, b in enumerate(blocks))


def verified(data: bytes) -> Manifest:
    """Returns the manifest of an arena that holds `data`."""
    blocks = [LAYOUT.block(index) for index in range(LAYOUT.block_count)]
    return LAYOUT.with_digests([block_digest(data[b.offset : b.offset + b.nbytes]) for b in blocks])


def probe(version: str) -> bytes:
    """Returns what a seed of a version records for others to reproduce."""
    return f"probe of {version}".encode()


class Truth:
    """All versions of a run."""

    def __init__(self, plan: Plan) -> None:
        self._bytes = {version: contents(plan, version) for version in VERSIONS}
        self._digests = {v: weights_digest([verified(data)]) for v, data in self._bytes.items()}

    def is_version(self, version: str, digest: str) -> bool:
        """Returns whether a digest is that of a version."""
        return self._digests.get(version) == digest != ""

    def lie(self, arena: Path, version: str, digest: str) -> str:
        """Says what is wrong with an arena that claims to hold a version; empty for nothing.

        Raises `OSError` when its process has gone meanwhile.
        """
        if not self.is_version(version, digest):
            return f"{digest} is not the digest of {version!r}"
        fd = os.open(arena, os.O_RDONLY)
        try:
            held = os.pread(fd, LAYOUT.data_bytes, HEADER_BYTES)
        finally:
            os.close(fd)
        right, at = self._bytes[version], range(0, LAYOUT.data_bytes, BLOCK_BYTES)
        wrong = [
            n for n, a in enumerate(at) if held[a : a + BLOCK_BYTES] != right[a:][:BLOCK_BYTES]
        ]
        return f"blocks {wrong} are not those of {version}" if wrong else ""
