"""What a fleet still holds when all pulls are over, and should not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from clients.errors import ClientError
from clients.relay import RelayClient
from tests.chaos.cast import Actor

_CLOSE_WAIT = "08"
"""State of a socket whose peer has closed it, in /proc/net/tcp (include/net/tcp_states.h)."""


async def of_relay(relay: Actor, engines: Iterable[Actor]) -> list[str]:
    """Lists what a relay holds beyond the arenas of the engines that are attached to it."""
    found = [f"{relay.name} {what}" for what in _half_closed(relay.pid)]
    own = {_inode(engine) for engine in engines}
    for inode, writable in _mapped(relay.pid):
        if writable or inode not in own:
            found.append(f"{relay.name} maps {'for writing' if writable else 'what nobody has'}")
    try:
        async with RelayClient(relay.said["address"]) as client:
            status = await client.status()
    except ClientError as error:
        return [*found, f"{relay.name}: {error}"]
    if status.transfers or status.lease_count:
        found.append(f"{relay.name} has {len(status.transfers)} pulls, {status.lease_count} leases")
    return found


def _inode(engine: Actor) -> str:
    return str(Path(f"/proc/{engine.pid}/fd/{engine.said['fd']}").stat().st_ino)


def _mapped(pid: int) -> Iterator[tuple[str, bool]]:
    """Yields inode of, and write access to, each memory file that a process maps (proc(5))."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            _, access, _, _, inode, _ = line.split(maxsplit=5)
            yield inode, "w" in access


def _half_closed(pid: int) -> Iterator[str]:
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(str(fd.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _CLOSE_WAIT and f"socket:[{columns[9]}]" in mine:
                yield f"keeps a socket that its peer has closed ({columns[1]})"
