"""A commit and those who read the weights that it replaces, through the relay. Plain Python.

For a while the commit waits for them, before the gate closes: no pause grows by that. Meanwhile
nobody begins to read what will be replaced. When the time is over their leases end, with the
reason. A relay that is away, or answers nothing, is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_service.core.instance import Instance
from engine_service.core.ports import RelayLink
from engine_service.core.update_request import ReadersWait, WeightUpdate
from engine_service.core.update_sources import Watched

LOOK_SECONDS = 0.05
LAST_WORD_SECONDS = 1.0
"""Longest wait for a relay to end leases. Without, readers find out by themselves."""
_log = logging.getLogger(__name__)


@asynccontextmanager
async def closed_to_readers(
    instance: Instance, wanted: WeightUpdate, watched: Watched
) -> AsyncIterator[ReadersWait]:
    """Waits for readers, and lets none begin within. What fails within lets them read on."""
    link, seconds = instance.link, wanted.lease_wait_seconds
    seconds = instance.config.lease_wait_seconds if seconds is None else seconds
    if not link or not seconds:
        yield ReadersWait()
        return
    try:
        yield await _waited(link, wanted.version, seconds, watched)
    except BaseException:
        await instance.tell_relay()
        raise


async def _waited(link: RelayLink, version: str, seconds: float, watched: Watched) -> ReadersWait:
    clock, wait, seen = asyncio.get_running_loop().time, ReadersWait(), set[str]()
    began = clock()
    try:
        async with asyncio.timeout(seconds):
            while reading := await link.closing(version):
                seen.update(reading)
                watched.note = f"waiting for {len(reading)} readers: {', '.join(sorted(seen))}"
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        wait.leases_ended = await _end_leases(link, version)
    wait.readers, wait.seconds, watched.note = len(seen), clock() - began, ""
    if seen:
        _log.info(
            "waited %.2f s for %d readers of the weights that serve, ended %d leases",
            wait.seconds, wait.readers, wait.leases_ended,
        )  # fmt: skip
    return wait


async def _end_leases(link: RelayLink, version: str) -> int:
    try:
        async with asyncio.timeout(LAST_WORD_SECONDS):
            return len(await link.closing(version, ends_leases=True))
    except TimeoutError:
        _log.warning("relay %s does not say who reads: not waiting for it", link.address)
        return 0
