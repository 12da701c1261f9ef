"""Digests of blocks, and roots over digests: XXH3-128 in canonical form, 16 bytes.

Plain Python. The source is github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

import xxhash


def block_digest(data: memoryview | bytes) -> bytes:
    """Digests a block."""
    return xxhash.xxh3_128_digest(data)


def block_hasher() -> xxhash.xxh3_128:
    """Returns what digests a block piece by piece, with the result of `block_digest`."""
    return xxhash.xxh3_128()


def root_digest(domain: str, parts: list[bytes]) -> bytes:
    """Returns a root over parts, in their order; no other domain has the same."""
    hasher = xxhash.xxh3_128(domain.encode())
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
