"""Settings of a relay service, checked once."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from relay_service.core.grants import MAX_PER_READ
from relay_service.core.security import Security
from relay_service.errors import ConfigError

DATA_CONNECTIONS = max(1, min(MAX_PER_READ, (os.cpu_count() or 1) // 2))
"""Each one keeps a core busy at either end: on two cores one is faster than several."""
_ANY_HOST = ("", "0.0.0.0", "[::]")  # noqa: S104 - what is listened on, not whom we trust


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Settings of one relay."""

    listen: str
    """Address to listen on, `HOST:PORT`; port 0 picks a free one."""
    data_listen: str = ""
    """Address of the data port, `HOST:PORT`; empty for a free port of the host of `listen`."""
    data_connections: int = DATA_CONNECTIONS
    """Connections over which its targets read from a data port, at most."""
    join: str = ""
    """Addresses of the directories, separated by commas; empty when this relay is the directory."""
    advertise: str = ""
    """Address under which other relays reach this one; empty for the listening one."""
    egress_limit_bytes_per_second: int = 0
    """Most bytes per second that this relay's sources give away; 0 for no limit."""
    egress_limit_per_instance_bytes_per_second: int = 0
    """Most bytes per second that each of its instances gives away; 0 for no limit."""
    ingress_limit_bytes_per_second: int = 0
    """Most bytes per second that come to this relay's targets, all together; 0 for no limit."""
    grace_seconds: float = 10.0
    """Time that running calls get at SIGTERM."""
    metrics_listen: str = ""
    """Address to serve metrics on, `HOST:PORT`; empty for none."""
    security: Security = field(default_factory=Security)
    """TLS and tokens; beyond loopback both, or the word that it may go without."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a setting that cannot work."""
        self.security.check_listen(self.listen)
        if not 1 <= self.data_connections <= MAX_PER_READ:
            raise ConfigError(
                f"{self.data_connections} connections: 1 to {MAX_PER_READ} are possible",
                field="data_connections",
            )
        if self.data_listen:
            self.security.check_listen(self.data_listen, field="data_listen")
        if self.metrics_listen:
            self.security.check_listen(self.metrics_listen)


def data_address(listen: str, port: int) -> str:
    """Returns what readers are told of a data port.

    Without a host unless one was named that they can reach: then it is that of the relay, by
    whatever name they reach it.
    """
    host = listen.rpartition(":")[0]
    return f"{'' if host in _ANY_HOST else host}:{port}"


def socket_path(address: str) -> Path:
    """Returns where the relay that listens on `address` takes attachments.

    The address names it, so a restarted relay takes the place of a killed one.
    """
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in address)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir())
    return base / f"seedrelay-{os.getuid()}" / f"relay-{name}.sock"
