"""Says when there is news of an instance. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from contextlib import suppress

from engine_service.core.instance import Instance
from engine_service.core.membership import ExpertProgress
from relay_service.core.instance import State

NEWS_SECONDS = 0.1
"""Shortest time between two pieces of news; what comes and goes within it is missed."""
PROGRESS_SECONDS = 1.0
"""How often it is news that bytes have come."""


async def news(instance: Instance) -> AsyncGenerator[None]:
    """Yields at once, and again when something is new; ends after `STOPPED`.

    New is another state or reason, gate, version, digest or epoch, other members, another phase
    of an update, a fill or a recovery, and how far these are. State changes wake it; for the
    rest it looks, so nobody who changes anything has to think of those who watch.
    """
    clock, told = asyncio.get_running_loop().time, 0.0
    seen: tuple[Hashable, ...] = ()
    moved: tuple[int, ...] = ()
    while True:
        now, moves = _facts(instance), _bytes(instance)
        if now != seen or (moves != moved and clock() - told >= PROGRESS_SECONDS):
            seen, moved, told = now, moves, clock()
            yield
            if now[0] is State.STOPPED:
                return
            await asyncio.sleep(NEWS_SECONDS)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(NEWS_SECONDS):
                    await instance.lifecycle.changed()


def _facts(instance: Instance) -> tuple[Hashable, ...]:
    lifecycle, engine = instance.lifecycle, instance.engine
    fill, update, recovery = instance.progress, instance.updating(), _recovery(instance)
    return (
        lifecycle.state, lifecycle.reason, engine.gate.closed_by, engine.weights,
        instance.membership,
        fill and (fill.phase, fill.source_instance, fill.transport),
        update and (update.session, update.phase),
        recovery and (recovery.phase, recovery.source, recovery.note),
    )  # fmt: skip


def _bytes(instance: Instance) -> tuple[int, ...]:
    fill, update, recovery = instance.progress, instance.updating(), _recovery(instance)
    return (
        fill.bytes_verified if fill else 0,
        update.bytes_done if update else 0,
        recovery.bytes_done if recovery else 0,
    )


def _recovery(instance: Instance) -> ExpertProgress | None:
    return instance.recovery.progress if instance.recovery else None
