"""Grants: one-time permissions to read some blocks outside gRPC. Plain Python.

Whoever holds a lease gets them over gRPC, and shows each one once, on a connection of its own.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from relay_service.errors import InvalidRequest, Refused, ResourceExhausted

GRANT_SECONDS = 10.0
"""Time in which a grant must be shown."""
MAX_CONNECTIONS = 64
"""Connections that all readers of one relay may have, granted ones included."""
MAX_PER_READ = 4
NAME_BYTES: Final = 16
TOKEN_BYTES: Final = NAME_BYTES + 32

Run = tuple[int, int]
"""First block and number of blocks that follow one another."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What may be read on one connection: some blocks of one rank, under one lease."""

    lease: str
    instance: str
    generation: str
    epoch: int
    rank: int
    runs: tuple[Run, ...]
    """In order, and apart from each other."""

    def covers(self, first: int, count: int) -> bool:
        """Returns whether `count` blocks from `first` on may be read."""
        number = bisect_right(self.runs, first, key=lambda run: run[0]) - 1
        if number < 0 or count < 1:
            return False
        start, length = self.runs[number]
        return first + count <= start + length


def runs_of(blocks: Sequence[int]) -> tuple[Run, ...]:
    """Puts blocks in order, and together what follows one another."""
    runs: list[list[int]] = []
    for block in sorted(set(blocks)):
        if runs and block == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return tuple((first, count) for first, count in runs)


def check_runs(runs: Sequence[Run], blocks: int) -> None:
    """Raises `InvalidRequest` for runs that are not of so many blocks, in order, each once."""
    end = 0
    for first, count in runs:
        if not (end <= first and count >= 1 and first + count <= blocks):
            raise InvalidRequest(
                f"{count} blocks at {first} of {blocks}: they are granted in order, each once",
                field="runs",
            )
        end = first + count
    if not runs:
        raise InvalidRequest("a grant is for some blocks", field="runs")


class Grants:
    """All grants of one relay, and how many connections they may make. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[bytes, tuple[bytes, float, Grant]] = {}
        self._connected = 0

    def issue(self, grant: Grant, connections: int) -> list[bytes]:
        """Returns tokens for as many connections as are asked for, or as there is room for.

        The fuller it is, the fewer go to one reader. Raises `ResourceExhausted` for none.
        """
        with self._lock:
            self._expire()
            free = MAX_CONNECTIONS - self._connected - len(self._pending)
            if free <= 0:
                raise ResourceExhausted(f"{MAX_CONNECTIONS} connections are in use or granted")
            count = max(1, min(connections, MAX_PER_READ, free // 8))
            return [self._issue(grant) for _ in range(count)]

    def redeem(self, token: bytes) -> Grant:
        """Takes a token back for what it permits; `release` ends that. Raises `Refused`."""
        name, secret = token[:NAME_BYTES], token[NAME_BYTES:]
        with self._lock:
            self._expire()
            known, _, grant = self._pending.get(name, (b"", 0.0, None))
            # Who knows the name alone, from a log for example, neither reads nor spoils it.
            if grant is None or not hmac.compare_digest(known, secret):
                raise Refused("the grant is unknown, was used or has expired")
            del self._pending[name]
            self._connected += 1
            return grant

    def release(self) -> None:
        """Counts a connection as ended that a token was redeemed for."""
        with self._lock:
            self._connected -= 1

    @property
    def in_use(self) -> int:
        """Connections that there are or may be."""
        with self._lock:
            self._expire()
            return self._connected + len(self._pending)

    def _issue(self, grant: Grant) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        until = self._clock() + GRANT_SECONDS
        self._pending[token[:NAME_BYTES]] = token[NAME_BYTES:], until, grant
        return token

    def _expire(self) -> None:
        now = self._clock()
        for name in [n for n, (_, until, _) in self._pending.items() if until <= now]:
            del self._pending[name]
