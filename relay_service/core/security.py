"""What a service demands before it listens, and the files that say who may call. Plain Python."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from relay_service.errors import ConfigError

Stamp = tuple[tuple[int, int, int, int], ...]
"""Identity of some files; another one means that they may say something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Names of the files that TLS and tokens come from; empty for none."""

    tls_cert: str = ""
    """Own certificate chain, PEM: of a service, and of whoever calls one."""
    tls_key: str = ""
    """Private key of the certificate, PEM, without a password."""
    tls_ca: str = ""
    """Certificates, PEM, that the other side's certificate must come from."""
    token_file: str = ""
    """Lines of `scope[,scope] token`."""
    insecure: bool = False
    """Listens beyond loopback without all of these."""

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.tls_ca or self.tls_cert or self.tls_key)

    def check_listen(self, listen: str, field: str = "listen") -> None:
        """Raises `ConfigError` for an address that may not be listened on with these files."""
        host, _, port = listen.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > 0xFFFF:
            raise ConfigError(
                f"{listen!r} is not HOST:PORT", field=field, hint="for example 127.0.0.1:0"
            )
        if self.tls and not (self.tls_cert and self.tls_key and self.tls_ca):
            raise ConfigError(
                f"TLS is mutual: {self._missing()} is missing",
                field="tls", hint="name certificate, key and the CA of those who may call",
            )  # fmt: skip
        if not is_loopback(listen) and not self.insecure and self._missing():
            raise ConfigError(
                f"{listen} is beyond loopback and {self._missing()} is missing",
                field=field,
                hint="pass --tls-cert, --tls-key, --tls-ca and --token-file, listen on "
                "127.0.0.1, or pass --insecure on a trusted network",
            )

    def _missing(self) -> str:
        given = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca,
                 "--token-file": self.token_file}  # fmt: skip
        return ", ".join(flag for flag, value in given.items() if not value)


def is_loopback(address: str) -> bool:
    """Returns whether `HOST:PORT` can be reached from this host alone."""
    host = address.rpartition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False  # some other name: who knows where it leads


def stamp_of(*paths: str) -> Stamp:
    """Identifies files as they are now; one that is not there is all zeros."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: str) -> tuple[int, int, int, int]:
    try:
        now = os.stat(path)  # noqa: PTH116 - for every call, so without making a Path
    except OSError:
        return 0, 0, 0, 0
    return now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_size
