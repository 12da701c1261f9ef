"""Folders that updates may read, and whether their files are those that were meant.

Nothing beyond the model root is read, whatever a path or a link says.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine_service.errors import CheckpointError, ConfigError, InvalidRequest
from relay_service.core.attachment import ARTIFACT_NAMES, MAX_ARTIFACT_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
SIGNATURE_BYTES = 64
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


class ModelRoot:
    """The folder below which updates may read."""

    def __init__(self, root: Path, key: Path | None = None) -> None:
        """`key` is a PEM file with the Ed25519 public key of who signs folders.

        Raises `ConfigError` for one that cannot be used.
        """
        self._root = root.resolve()
        self._key = _read_key(key) if key else None

    @property
    def signed(self) -> bool:
        """Whether every file must be one that the signature covers."""
        return self._key is not None

    def folder(self, name: str) -> Path:
        """Returns a folder of checkpoints. Raises `InvalidRequest`."""
        try:
            found = (self._root / name).resolve()
        except (ValueError, OSError) as error:  # a zero byte, or links in a circle
            raise InvalidRequest(f"{name!r} is no path: {error}", field="folder") from error
        self._check_below(found, name)
        if not found.is_dir():
            raise InvalidRequest(f"{name!r} is not a folder", field="folder", found=str(found))
        for path in found.iterdir():
            if path.suffix == ".safetensors" or path.name in ARTIFACT_NAMES:
                self._check_below(path.resolve(), f"{name}/{path.name}")
        return found

    def sums(self, folder: Path, given: Mapping[str, str]) -> dict[str, str]:
        """Returns the SHA-256 that files of a folder must have; empty where nobody says.

        What the caller says comes before what the folder says. Raises `CheckpointError`
        for a list that is broken, or not signed by who should have.
        """
        path = folder / SUMS
        self._check_below(path.resolve(), SUMS)
        text = path.read_bytes()[: MAX_ARTIFACT_BYTES + 1] if path.is_file() else b""
        if len(text) > MAX_ARTIFACT_BYTES:
            raise CheckpointError(f"{SUMS} is larger than {MAX_ARTIFACT_BYTES} bytes", file=SUMS)
        if self._key:
            _verify(self._key, folder, text)
        stated = _parse(text) if text else {}
        told = {name: digest.lower() for name, digest in given.items()}
        for name in told.keys() & stated.keys():
            if told[name] != stated[name]:
                raise CheckpointError(f"{SUMS} says another SHA-256 of {name}", file=name)
        # A signature says which files may be read; nobody adds to that.
        return stated if self._key else {**stated, **told}

    def _check_below(self, path: Path, name: str) -> None:
        if not path.is_relative_to(self._root):
            raise InvalidRequest(
                f"{name!r} lies outside the model root", field="folder",
                expected=f"a folder below {self._root}", hint="see --model-root",
            )  # fmt: skip


def _parse(text: bytes) -> dict[str, str]:
    """Reads the format of coreutils' `sha256sum`."""
    sums: dict[str, str] = {}
    for line in text.decode(errors="replace").splitlines():
        found = _LINE.fullmatch(line)
        if line and (not found or "/" in found[2]):
            raise CheckpointError(f"{SUMS}: {line!r:.80} names no file of the folder", file=SUMS)
        if found:
            sums[found[2]] = found[1].lower()
    return sums


def _read_key(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", field="model_key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} holds no Ed25519 public key", field="model_key")
    return key


def _verify(key: Ed25519PublicKey, folder: Path, text: bytes) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        with (folder / SIGNATURE).open("rb") as file:
            raw = file.read(4 * SIGNATURE_BYTES)
        signature = raw if len(raw) == SIGNATURE_BYTES else base64.b64decode(raw)
        key.verify(signature, text)
    except OSError as error:
        raise CheckpointError(f"{SIGNATURE}: {error.strerror}", file=SIGNATURE) from error
    except (InvalidSignature, binascii.Error) as error:
        raise CheckpointError(
            f"{SIGNATURE} does not sign {SUMS} with the key of --model-key", file=SIGNATURE
        ) from error
