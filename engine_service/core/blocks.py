"""Bookkeeping of KV blocks: who holds them, and which tokens they are of. Plain Python.

A full block can be published under a key that stands for its tokens, everything
before them, and the weights and adapter that computed it. Whoever begins with the
same tokens takes it instead of computing it again. A published block that nobody
holds keeps its KV until the room is needed, the longest unused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes


class BlockPool:
    """A fixed number of KV blocks of `block_tokens` positions each."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self._empty = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Published blocks that nobody holds, the longest unused first."""

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.free

    @property
    def free(self) -> int:
        """Blocks that nobody holds; some of them may still be found by their key."""
        return len(self._empty) + len(self._unused)

    @property
    def unused(self) -> int:
        """Blocks that nobody holds and that can still be found by their key."""
        return len(self._unused)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their key, held or not."""
        return len(self._blocks)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def grow(self, blocks: list[int], tokens: int) -> bool:
        """Grows a sequence's blocks to hold `tokens` positions; all or nothing."""
        missing = self.needed(tokens) - len(blocks)
        if missing > self.free:
            return False
        blocks.extend(self._take() for _ in range(missing))
        return True

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Holds and returns the published blocks of the first keys, as far as there are any."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self._unused.pop(block, None)
            self._holders[block] += 1
            found.append(block)
        return found

    def publish(self, block: int, key: Key) -> None:
        """Lets others find a full block, whose KV is computed and will not change."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def release(self, blocks: list[int]) -> None:
        """Takes a sequence's blocks back and empties its list."""
        # The end of a prefix is of no use without its begin, so it goes first.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._keys:
                self._unused[block] = None
            else:
                self._empty.append(block)
        blocks.clear()

    def forget(self) -> int:
        """Lets no block be found any more; returns how many could be."""
        count = len(self._blocks)
        self._empty += self._unused
        self._unused.clear()
        self._blocks.clear()
        self._keys.clear()
        return count

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            del self._blocks[self._keys.pop(block)]
        self._holders[block] = 1
        return block


def extend_keys(keys: list[Key], origin: str, tokens: Sequence[int], block_tokens: int) -> None:
    """Appends the keys of the full blocks of a sequence that are not in the list yet.

    Args:
        keys: Keys of its first blocks, as far as they are known.
        origin: Names what computes the KV: weights and adapter.
        tokens: The sequence from its begin.
        block_tokens: Tokens in one block.

    A key is a digest that nobody can forge (BLAKE2, RFC 7693): with a weaker one a
    caller could look for a prompt that reads somebody else's KV.
    """
    key = keys[-1] if keys else origin.encode()
    for start in range(len(keys) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        data = array("q", tokens[start : start + block_tokens]).tobytes()
        key = hashlib.blake2b(key + b"/" + data, digest_size=16).digest()
        keys.append(key)
