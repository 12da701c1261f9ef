"""Notices a file that changed while it was read, or another one in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine_service.core.update_messages import FileIdentity
from engine_service.errors import CheckpointError


def identities(folder: Path) -> dict[Path, FileIdentity]:
    """Returns which files of weights, and which indexes, are in a folder now."""
    found = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    return {path: FileIdentity.of(path.name, path.stat()) for path in found if path.is_file()}


def check_same(
    before: Mapping[Path, FileIdentity], read: Mapping[Path, os.stat_result]
) -> tuple[FileIdentity, ...]:
    """Returns which files were read, given what their descriptors said at the end.

    Raises `CheckpointError` naming the first one that is not what it was `before`, or whose
    place another one has taken.
    """
    return tuple(sorted(_checked(before, read), key=lambda one: one.name))


def _checked(
    before: Mapping[Path, FileIdentity], read: Mapping[Path, os.stat_result]
) -> Iterable[FileIdentity]:
    indexes = dict.fromkeys(path for path in before if path.suffix == ".json")
    found: dict[Path, os.stat_result | None] = {**read, **indexes}
    for path, status in found.items():
        try:
            now = FileIdentity.of(path.name, path.stat())
        except OSError as error:
            raise _changed(path, "is not there any more") from error
        known = before.get(path)
        if now != known or (status and FileIdentity.of(path.name, status) != known):
            raise _changed(path, "has changed")
        yield now


def _changed(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} {how} while it was read: what was staged is dropped",
        file=path.name, hint="write a checkpoint to the end before it is named",
    )  # fmt: skip
