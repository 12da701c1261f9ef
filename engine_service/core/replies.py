"""Waits for what several ranks answer. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from engine_service import errors
from engine_service.core.messages import Reply

R = TypeVar("R", bound=Reply)
T = TypeVar("T")


def quiet(work: asyncio.Future[T]) -> asyncio.Future[T]:
    """Returns work whose failure is no news when the one who waited for it has gone."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work


async def let_go(replies: Sequence[asyncio.Future[Any]]) -> None:
    """Waits for replies no more; afterwards nobody reads the streams that they come on."""
    for reply in replies:
        quiet(reply).cancel()
    if replies:
        await asyncio.wait(replies)


async def failures_of(
    replies: Sequence[asyncio.Future[R]], *, past: type[errors.EngineError] | None = None
) -> list[BaseException]:
    """Waits for all replies, or until a rank has died; returns the errors so far.

    Errors of a kind that is `past` are no death.
    """
    pending = set(replies)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        if any(died(reply.exception(), past) for reply in done):
            for reply in pending:
                reply.cancel()
            break
    found = (reply.exception() for reply in replies if reply.done() and not reply.cancelled())
    return [error for error in found if error]


def died(error: BaseException | None, past: type[errors.EngineError] | None = None) -> bool:
    """Returns whether an error says that a rank has died."""
    return isinstance(error, errors.RankDied) and not (past and isinstance(error, past))


def cause(failures: Sequence[BaseException]) -> BaseException:
    """Returns the error to tell: that others missed one is no news beside what happened to it.

    That a rank has died comes first: who is left has more to do than to tell.
    """
    return min(failures, key=lambda one: (isinstance(one, errors.CollectiveFailed), not died(one)))
