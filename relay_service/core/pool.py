"""Who reads which blocks: each is asked of one source at a time. Plain Python.

A source claims a part of what is free, in proportion to its pace. One that finds nothing free
has a part of what another one was asked for recalled, when that would take that one long; so a
slow source loses its work to faster ones, and what a failed one had not given is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence

from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.pace import Pace, fraction

STEAL_SECONDS = 0.25
"""What is done sooner than that is not worth a new request."""
STEAL_BLOCKS = 8
"""So many are worth one while nobody knows how long they take."""
LOOK_SECONDS = 0.1
"""How often one without work looks whether another has become slow."""


class Recalled(Exception):
    """Ends a read after a block has landed: others shall read the rest of it."""


class Claim:
    """Blocks that one source is asked for."""

    def __init__(self, pace: Pace, blocks: Sequence[int]) -> None:
        self.pace = pace
        self.blocks = blocks
        self.recalled = False
        """Set when it is to be given back after the next block."""
        self.gave = False
        """Whether anything of it has landed."""


class Pool:
    """The blocks of one rank that are missing, and who is asked for them. On one event loop."""

    def __init__(self, missing: Callable[[], list[int]], unit: Callable[[int], int]) -> None:
        """`missing` lists what is not verified, in order; `unit` says to which unit one belongs."""
        self._missing = missing
        self._unit = unit
        self._readers: list[Pace] = []
        self._idle: list[Pace] = []
        self._claims: list[Claim] = []
        self._wrong: set[tuple[Pace, int]] = set()
        """Blocks that a source sent wrong: another one is asked for them, if there is one."""
        self._news = asyncio.Event()

    def join(self, reader: Pace) -> None:
        """Lets a source take part."""
        self._readers.append(reader)

    def leave(self, reader: Pace) -> None:
        """Ends the part of a source. Doing so twice is harmless."""
        self._readers = [one for one in self._readers if one is not reader]
        for claim in self._claims:
            claim.recalled |= claim.pace is reader
        self._tell()

    async def claim(self, reader: Pace) -> Claim | None:
        """Waits for blocks to read; returns None when all are verified, or the reader has left."""
        self._idle.append(reader)
        try:
            while reader in self._readers and (missing := self._missing()):
                if free := self._free(missing, reader):
                    return self._take(reader, free)
                self._recall(missing)
                await self._look_again()
        finally:
            self._idle.remove(reader)
        return None

    def give_back(self, claim: Claim) -> None:
        """Ends a claim; what has not landed is free."""
        self._claims.remove(claim)
        claim.pace.answered()
        self._tell()

    def came_wrong(self, reader: Pace, block: int) -> None:
        """Has another one asked for a block. From any thread."""
        self._wrong.add((reader, block))

    def _free(self, missing: Sequence[int], reader: Pace) -> list[int]:
        claimed = {block for claim in self._claims for block in claim.blocks}
        return [b for b in missing if b not in claimed and not self._better_elsewhere(b, reader)]

    def _better_elsewhere(self, block: int, reader: Pace) -> bool:
        if (reader, block) not in self._wrong:
            return False
        return any((other, block) not in self._wrong for other in self._readers)

    def _take(self, reader: Pace, free: list[int]) -> Claim:
        """Claims a part for one of those who wait: the eldest from the front, others from the end.

        In order, so that who reads from the target meanwhile finds what it looks for next.
        """
        waiting = [one for one in self._readers if one in self._idle]
        count = max(1, math.ceil(len(free) * fraction(reader, waiting)))
        if waiting[0] is reader:
            blocks = free[: self._edge(free, count)]
        else:
            blocks = free[self._edge(free, len(free) - count) :]
        claim = Claim(reader, blocks)
        self._claims.append(claim)
        reader.asked()
        return claim

    def _edge(self, free: list[int], at: int) -> int:
        """Returns a place near `at` where a unit ends, so that units come whole; else `at`."""
        reach = min(at, len(free) - at) // 4
        near = range(max(1, at - reach), min(len(free), at + reach + 1))
        edges = [n for n in near if self._unit(free[n - 1]) != self._unit(free[n])]
        return min(edges, key=lambda n: abs(n - at), default=at)

    def _recall(self, missing: Sequence[int]) -> None:
        """Recalls the claim that would take longest, if it is worth that."""
        lacking = set(missing)
        longest, seconds = None, STEAL_SECONDS
        for claim in self._claims:
            left = sum(block in lacking for block in claim.blocks)
            needs = claim.pace.seconds_for(left * BLOCK_BYTES)
            if needs is None:
                needs = math.inf if left >= STEAL_BLOCKS else 0.0
            if left > 1 and needs > seconds and not claim.recalled:
                longest, seconds = claim, needs
        if longest:
            longest.recalled = True

    async def _look_again(self) -> None:
        news = self._news
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
