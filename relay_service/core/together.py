"""Runs several things at once and ends only when all of them have ended. Plain Python.

A task group would hand out an `ExceptionGroup`, out of which `except*` makes one error on some
Pythons only; and leaving threads behind would let them write into memory that is about to be
unmapped.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*parts: Coroutine[Any, Any, T]) -> list[T]:
    """Awaits every part, also when one fails or the caller is cancelled.

    Raises the first failure, in the order of the parts.
    """
    results = await asyncio.gather(*parts, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


async def jointly(*parts: Coroutine[Any, Any, Any]) -> None:
    """Awaits every part; one that fails ends the others, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def in_thread(
    work: Callable[[], T],
    executor: Executor | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> T:
    """Runs `work` on a thread and waits for its end, however often it is cancelled.

    `interrupt` is called when it is, to make the end come soon.
    """
    run = contextvars.copy_context().run
    task = asyncio.get_running_loop().run_in_executor(executor, run, work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            interrupt()
    if cancelled:
        task.exception()  # looked at, so that nobody reports it as forgotten
        raise cancelled
    return task.result()
