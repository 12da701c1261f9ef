"""Bookkeeping of KV blocks: which are free. Plain Python."""

from __future__ import annotations


class BlockPool:
    """A fixed number of KV blocks of `block_tokens` positions each."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def used(self) -> int:
        """Blocks that are handed out."""
        return self.total - len(self._free)

    @property
    def free(self) -> int:
        """Blocks that are not handed out."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def grow(self, blocks: list[int], tokens: int) -> bool:
        """Grows a sequence's blocks to hold `tokens` positions; all or nothing."""
        missing = self.needed(tokens) - len(blocks)
        if missing > len(self._free):
            return False
        blocks.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, blocks: list[int]) -> None:
        """Takes a sequence's blocks back and empties its list."""
        self._free.extend(reversed(blocks))
        blocks.clear()
