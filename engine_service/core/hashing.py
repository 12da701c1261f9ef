"""Holds files of a checkpoint to their SHA-256. Plain Python."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine_service.core.update_messages import FileIdentity
from engine_service.errors import CheckpointError
from relay_service.core.rate import TokenBucket

NICENESS = 19
_CHUNK_BYTES = 1 << 20


class Hashing:
    """Hashes whole files, in a thread that gives way to everybody else."""

    def __init__(self, folder: Path, sums: Mapping[str, str], bytes_per_second: int) -> None:
        self._folder = folder
        self._sums = sums
        self._bucket = TokenBucket(bytes_per_second)
        self._stopped = threading.Event()

    async def run(self) -> dict[str, FileIdentity]:
        """Returns which files were hashed, by name; a caller who leaves ends it early.

        Raises `CheckpointError` for one that is missing, or another than was meant.
        """
        # A thread of its own: one that has given way may never take its place again.
        pool = ThreadPoolExecutor(1, "hashing", _give_way)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, self._run)
        finally:
            self._stopped.set()
            pool.shutdown(wait=False)

    def _run(self) -> dict[str, FileIdentity]:
        names = sorted(n for n in self._sums if n.endswith((".safetensors", ".index.json")))
        return {name: self._hash(name) for name in names}

    def _hash(self, name: str) -> FileIdentity:
        digest = hashlib.sha256()
        try:
            with (self._folder / name).open("rb") as file:
                first = os.fstat(file.fileno())
                while chunk := file.read(_CHUNK_BYTES):
                    if self._stopped.is_set():
                        raise CheckpointError(f"{name}: nobody waits for its SHA-256", file=name)
                    digest.update(chunk)
                    time.sleep(self._bucket.delay(len(chunk)))
                last = os.fstat(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{name}: {error.strerror}", file=name) from error
        identity = FileIdentity.of(name, first)
        if identity != FileIdentity.of(name, last):
            raise CheckpointError(f"{name} was changed while it was read", file=name)
        check_sum(name, digest.hexdigest(), self._sums)
        return identity


def check_sum(name: str, found: str, sums: Mapping[str, str]) -> None:
    """Raises `CheckpointError` for a file that is another one than was meant."""
    if found != sums[name]:
        raise CheckpointError(
            f"{name}: its SHA-256 is not the one that was given", file=name,
            expected=sums[name], found=found,
        )  # fmt: skip


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
