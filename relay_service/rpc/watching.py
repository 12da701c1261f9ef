"""What those get who watch transfers: of the fleet, or of one that they have started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from relay_service.core.transfer_state import TransferState
from relay_service.core.transfers import Transfer
from relay_service.errors import InvalidRequest, PullEnded
from relay_service.rpc import convert
from seedrelay.v1 import relay_pb2

NEWS_SECONDS = 0.1
"""Shortest time between two looks; what comes and goes within it is missed."""
INTERVAL_SECONDS = 1.0
PROGRESS_SECONDS = 0.1


async def news(
    look: Callable[[], list[TransferState]], interval_seconds: float = INTERVAL_SECONDS
) -> AsyncIterator[list[TransferState]]:
    """Yields the transfers at once, when one of them has news, and at least every interval.

    Nothing is kept for who takes them slowly: the next one they get is the newest. Raises
    `InvalidRequest` for an interval that is shorter than `NEWS_SECONDS`.
    """
    if not interval_seconds >= NEWS_SECONDS:
        raise InvalidRequest(f"news come every {NEWS_SECONDS} s at most", field="interval")
    stages: list[tuple[object, ...]] | None = None
    told = 0.0
    while True:
        states = look()
        now = [state.stage for state in states]
        if now != stages or time.monotonic() - told >= interval_seconds:
            stages, told = now, time.monotonic()
            yield states
        await asyncio.sleep(NEWS_SECONDS)


async def progress(transfer: Transfer) -> AsyncIterator[relay_pb2.PullResponse]:
    """Yields how far a pull is, at last with its report. Raises what ended it."""
    while not transfer.task.done():
        yield relay_pb2.PullResponse(progress=convert.progress_to_proto(transfer))
        await asyncio.wait([transfer.task], timeout=PROGRESS_SECONDS)
    if transfer.task.cancelled():
        raise PullEnded(f"the pull into {transfer.holding.name} was ended")
    report = transfer.task.result()
    yield relay_pb2.PullResponse(
        progress=convert.progress_to_proto(transfer),
        report=convert.report_to_proto(transfer),
        probe=report.probe,
    )
