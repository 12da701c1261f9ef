"""What `checksums.json` says of a model folder, and whether the folder still is so."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine_service.errors import CheckpointError

CHECKSUMS = "checksums.json"

HASH_AT_MOST_BYTES = 1 << 30
"""A larger folder is known again by its files' sizes alone: hashing it takes seconds."""

Recipe = Mapping[str, str | int | float | bool]
"""What a folder is made from: equal recipes make equal files."""


class FileSum(msgspec.Struct, frozen=True):
    """Size and digest of one file."""

    bytes: int
    sha256: str


class Checksums(msgspec.Struct, frozen=True):
    """Content of `checksums.json`."""

    recipe: dict[str, str | int | float | bool]
    files: dict[str, FileSum]


def sha256_of(path: Path) -> str:
    """Returns the digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checksums(folder: Path) -> Checksums:
    """Reads `checksums.json`; refuses a folder without one, as it was not made here."""
    try:
        return msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=Checksums)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{folder} is in the way: it holds no readable {CHECKSUMS}, so it was not made "
            "by this command; choose another folder or move it away",
            path=str(folder),
        ) from error


def check_recipe(folder: Path, expected: Recipe, found: Recipe) -> None:
    """Refuses a folder that was made from something else; names the first difference."""
    for field in sorted({*expected, *found}):
        want, have = str(expected.get(field)), str(found.get(field))
        if want != have:
            raise CheckpointError(
                f"{folder} holds another model: its {field} is {have}, not {want}; "
                "choose another folder or move it away",
                path=str(folder),
                field=field,
                expected=want,
                found=have,
            )


def is_sound(folder: Path, files: Mapping[str, FileSum]) -> bool:
    """Whether all files have their size and, unless they are too large, their digest."""
    paths = {folder / name: file for name, file in files.items()}
    if not all(p.is_file() and p.stat().st_size == file.bytes for p, file in paths.items()):
        return False
    if sum(file.bytes for file in files.values()) > HASH_AT_MOST_BYTES:
        return True
    return all(sha256_of(p) == file.sha256 for p, file in paths.items())
