"""Writes the files of one model folder; size and sha256 are noted in the same pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from engine_service.checkpoint.checksums import CHECKSUMS, Checksums, FileSum, Recipe

Progress = Callable[[str, int, int | None], None]
"""Called with a phase, the bytes done in it, and its total (None while unknown)."""


class FolderWriter:
    """Writes files into `path` and remembers what it wrote."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path = path
        self.progress = progress
        self.files: dict[str, FileSum] = {}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes one file out of its pieces."""
        digest = hashlib.sha256()
        written = 0
        with (self.path / name).open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                written += len(chunk)
        self.files[name] = FileSum(written, digest.hexdigest())

    def write_text(self, name: str, text: str) -> None:
        """Writes a text as UTF-8."""
        self.write(name, [text.encode()])

    def write_json(self, name: str, value: object) -> None:
        """Writes `value` as JSON that a person can read, keys sorted."""
        self.write_text(name, f"{json.dumps(value, indent=2, sort_keys=True)}\n")

    def write_checksums(self, recipe: Recipe) -> None:
        """Writes what the folder was made from and the sums of all files before this one."""
        sums = Checksums(dict(recipe), self.files)
        text = msgspec.json.format(msgspec.json.encode(sums), indent=2)
        (self.path / CHECKSUMS).write_bytes(text + b"\n")
