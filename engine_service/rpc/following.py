"""Says how far something is until it has ended, for RPCs that stream their progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

P = TypeVar("P")
PROGRESS_SECONDS = 0.1


async def following(work: asyncio.Future[Any], progress: Callable[[], P]) -> AsyncGenerator[P]:
    """Yields how far work is until it has ended; leaving cancels the work."""
    try:
        while not work.done():
            yield progress()
            await asyncio.wait([work], timeout=PROGRESS_SECONDS)
    finally:
        work.cancel()
