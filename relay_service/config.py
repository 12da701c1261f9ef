"""Settings of a relay service, checked once."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from relay_service.errors import ConfigError

LOOPBACK = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Settings of one relay."""

    listen: str
    """Address to listen on, `HOST:PORT`; port 0 picks a free one."""
    join: str = ""
    """Address of the directory; empty when this relay is the directory."""
    advertise: str = ""
    """Address under which other relays reach this one; empty for the listening one."""
    egress_limit_bytes_per_second: int = 0
    """Most bytes per second that this relay's sources give away; 0 for no limit."""
    grace_seconds: float = 10.0
    """Time that running calls get at SIGTERM."""
    insecure: bool = False
    """Listens beyond loopback without TLS."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a setting that cannot work."""
        check_listen(self.listen, insecure=self.insecure)


def check_listen(listen: str, *, insecure: bool) -> None:
    """Raises `ConfigError` for an address that isn't one or may not be listened on."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(
            f"{listen!r} is not HOST:PORT", field="listen", hint="for example 127.0.0.1:0"
        )
    if not insecure and not listen.startswith(LOOPBACK):
        raise ConfigError(
            f"{listen} is beyond loopback and this version has no TLS",
            field="listen", hint="listen on 127.0.0.1, or pass --insecure on a trusted network",
        )  # fmt: skip


def socket_path(address: str) -> Path:
    """Returns where the relay that listens on `address` takes attachments.

    The address names it, so a restarted relay takes the place of a killed one.
    """
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in address)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir())
    return base / f"seedrelay-{os.getuid()}" / f"relay-{name}.sock"
