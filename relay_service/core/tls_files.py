"""Certificate, key and CA, read again whenever their files have changed. Plain Python."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from relay_service.core.security import Security, Stamp, stamp_of
from relay_service.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Content of the files, PEM; `cert` and `key` are empty for a client without them."""

    cert: bytes
    key: bytes
    ca: bytes

    def __repr__(self) -> str:
        """Says nothing: a key must not get into a log."""
        return "TlsMaterial(...)"


class TlsFiles:
    """The three files. New ones that do not fit together change nothing."""

    def __init__(self, security: Security) -> None:
        """Reads the files. Raises `ConfigError` for some that cannot be used."""
        self._paths = (security.tls_cert, security.tls_key, security.tls_ca)
        self.stamp: Stamp = stamp_of(*self._paths)
        self.material = _read(self._paths)

    def fresh(self) -> TlsMaterial:
        """Returns what the files say now, or said when they last made sense."""
        now = stamp_of(*self._paths)
        if now != self.stamp:
            self.stamp = now
            try:
                self.material = _read(self._paths)
            except ConfigError as error:
                _log.error("%s; the certificate that was read before stays in use", error)
            else:
                _log.info("read the certificate anew from %s", self._paths[0])
        return self.material


def _read(paths: tuple[str, str, str]) -> TlsMaterial:
    cert, key, ca = (_bytes(path) if path else b"" for path in paths)
    if bool(cert) != bool(key):
        raise _wrong("a certificate and its key come together")
    if not ca:
        raise _wrong("no CA is named to check the other side with", hint="pass --tls-ca")
    _check_pair(paths[0], paths[1])
    _check_ca(paths[2], ca)
    return TlsMaterial(cert, key, ca)


def _bytes(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from None
    if not data or len(data) > MAX_FILE_BYTES:
        raise _wrong(f"{path} is not a PEM file of at most {MAX_FILE_BYTES} bytes")
    return data


def _check_pair(cert: str, key: str) -> None:
    if not cert:
        return
    try:
        # Without a password given, OpenSSL would ask the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise _wrong(f"{cert} and {key} are no certificate and its key: {error}") from None


def _check_ca(path: str, ca: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} holds no CA certificates: {error}") from None


def _wrong(message: str, **details: str) -> ConfigError:
    return ConfigError(message, field="tls", **details)
