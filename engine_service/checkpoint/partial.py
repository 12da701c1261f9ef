"""Gives one process at a time a partial folder to build in.

Whoever builds holds a lock on the directory itself, and so do programs that it starts
there. The kernel drops it with the last of them, so what a killed one left behind is
cleared by the next, and no lock file stays.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_service.checkpoint.writer import Progress


@contextmanager
def sole_builder(partial: Path, progress: Progress) -> Iterator[None]:
    """Holds the folder `partial`, empty at first; removes it unless it was renamed.

    Waits while another process holds it.
    """
    descriptor = _lock(partial, progress)
    try:
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        if _is_at(descriptor, partial):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def _lock(partial: Path, progress: Progress) -> int:
    """Makes and locks the directory; returns its open descriptor.

    While this waited, the last holder may have renamed or removed the directory. Then
    the lock is on that one, and the next round makes a new one.
    """
    while True:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except (FileExistsError, FileNotFoundError):
            if partial.is_file():
                raise
            continue  # it went away in between
        try:
            _wait(descriptor, progress)
        except BaseException:
            os.close(descriptor)
            raise
        if _is_at(descriptor, partial):
            os.set_inheritable(descriptor, True)
            return descriptor
        os.close(descriptor)


def _wait(descriptor: int, progress: Progress) -> None:
    """Takes the lock; says so where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress("wait for another process", 0, None)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open directory; it may go away at any moment."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
