"""What is done to processes while an update goes on, and how its client and its engine end."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.engine import EngineClient
from seedrelay.v1 import weights_pb2

LIMIT_SECONDS = 60.0
FAILED = weights_pb2.INSTANCE_STATE_FAILED


def tell(updater: subprocess.Popen[str]) -> None:
    """Lets a client go on."""
    assert updater.stdin
    updater.stdin.write("\n")
    updater.stdin.flush()


async def ends(updater: subprocess.Popen[str]) -> str:
    """Waits for what a client says at its end."""
    assert updater.stdout
    async with asyncio.timeout(LIMIT_SECONDS):
        return await asyncio.to_thread(updater.stdout.read)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def no_files(pid: int) -> Iterator[None]:
    """Leaves a process no room for files, be they in memory, meanwhile."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def truncate(file: Path) -> None:
    """Cuts a file in half."""
    os.truncate(file, file.stat().st_size // 2)


def replace(file: Path) -> None:
    """Puts another file of the same bytes in its place."""
    shutil.copy(file, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


async def failed(client: EngineClient) -> str:
    """Waits until an instance has failed; returns why."""
    async with asyncio.timeout(30):
        async for status in client.watch():
            if status.state == FAILED:
                return status.reason
    raise AssertionError("it has ended without a reason")
