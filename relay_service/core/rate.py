"""Bounds the bytes per second of a reader or of a source. Plain Python."""

from __future__ import annotations

import asyncio
import threading
import time

from relay_service.core.manifest import BLOCK_BYTES


class TokenBucket:
    """Lets through at most `bytes_per_second`, smoothly; 0 lets everything through."""

    def __init__(self, bytes_per_second: float = 0) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def batch_blocks(self) -> int:
        """Blocks to take at a time: few when limited, so that the flow is even.

        Many otherwise: each hop between threads costs as much as a block or two.
        """
        return 1 if self.bytes_per_second else 256

    async def take(self, nbytes: int) -> None:
        """Waits until `nbytes` may pass. Takers are let through in their order."""
        if delay := self.delay(nbytes):
            await asyncio.sleep(delay)

    def delay(self, nbytes: int) -> float:
        """Counts `nbytes` as taken; returns the seconds to wait before they may pass.

        May be called from any thread.
        """
        if not self.bytes_per_second:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            # A pause earns no credit: a limit is a promise to the one who shares the link.
            self._free_at = start + nbytes / self.bytes_per_second
        return start - now


class Limits(TokenBucket):
    """Several limits that hold at once: what passes has been counted by each of them."""

    def __init__(self, *limits: TokenBucket) -> None:
        bounds = [limit.bytes_per_second for limit in limits if limit.bytes_per_second]
        super().__init__(min(bounds, default=0))
        self._limits = limits

    def delay(self, nbytes: int) -> float:
        """Counts `nbytes` everywhere; returns the longest of the waits."""
        return max((limit.delay(nbytes) for limit in self._limits), default=0.0)


def parse_rate(text: str) -> int:
    """Reads a rate such as `64MiB/s`, `1.5GiB/s` or `1000000` into bytes per second.

    Raises `ValueError` for anything else. Empty and `0` mean no limit.
    """
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": BLOCK_BYTES, "gib": 1 << 30,
             "kb": 10**3, "mb": 10**6, "gb": 10**9}  # fmt: skip
    value = text.strip().lower().removesuffix("/s")
    number = value.rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = value[len(number) :].strip() if number else value
    if not value:
        return 0
    if unit not in units or not number:
        raise ValueError(f"{text!r} is not a rate: write for example 64MiB/s")
    rate = float(number) * units[unit]
    # A rate that would be cut to 0 would mean no limit.
    if not (rate == 0 or 1 <= rate < 1 << 50):
        raise ValueError(f"{text!r} is out of range")
    return int(rate)
