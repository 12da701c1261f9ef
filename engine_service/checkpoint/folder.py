"""Makes a model folder once: whole or not at all, and reused where it is sound.

A folder is built beside its place, as `.NAME.partial`, and renamed when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_service.checkpoint.checksums import (
    CHECKSUMS,
    FileSum,
    Recipe,
    check_recipe,
    is_sound,
    read_checksums,
)
from engine_service.checkpoint.partial import sole_builder
from engine_service.checkpoint.writer import FolderWriter, Progress
from engine_service.errors import CheckpointError


@dataclass(frozen=True)
class ModelFolder:
    """A complete model folder."""

    path: Path
    files: dict[str, FileSum]
    reused: bool
    """Whether it was there already."""

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())


def cache_folder(name: str) -> Path:
    """Returns where the user's cache has the model folder `name`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "seedrelay" / "models" / name


def no_progress(_phase: str, _done: int, _total: int | None) -> None:
    """A `Progress` that nobody watches."""


def provide(
    path: Path,
    recipe: Recipe,
    fill: Callable[[FolderWriter], None],
    progress: Progress = no_progress,
) -> ModelFolder:
    """Returns the folder at `path`; makes it unless it is there and sound.

    Args:
        path: Where the folder belongs.
        recipe: What it is made from. A folder with another recipe is left as it is.
        fill: Writes every file of the folder.
        progress: Learns how far the work is.

    Raises:
        CheckpointError: Something else lies at `path`, or it cannot be written.
    """
    path = path.expanduser().resolve()
    try:
        return _find(path, recipe) or _build(path, recipe, fill, progress)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot make {path}: {reason}", path=str(path)) from error


def _find(path: Path, recipe: Recipe) -> ModelFolder | None:
    """Returns the sound folder at `path`; None where there is none or a damaged one of ours."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    sums = read_checksums(path)
    check_recipe(path, recipe, sums.recipe)
    if is_sound(path, sums.files):
        return ModelFolder(path, sums.files, reused=True)
    if strangers := {file.name for file in path.iterdir()} - {*sums.files, CHECKSUMS}:
        raise CheckpointError(
            f"the model in {path} is damaged, and {min(strangers)} beside it is no part of it; "
            "move the folder away to have it made anew",
            path=str(path),
        )
    return None


def _build(
    path: Path, recipe: Recipe, fill: Callable[[FolderWriter], None], progress: Progress
) -> ModelFolder:
    """Fills the partial folder and renames it, unless another process was first."""
    partial = path.with_name(f".{path.name}.partial")
    with sole_builder(partial, progress):
        if found := _find(path, recipe):
            return found
        writer = FolderWriter(partial, progress)
        fill(writer)
        writer.write_checksums(recipe)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        return ModelFolder(path, writer.files, reused=False)
