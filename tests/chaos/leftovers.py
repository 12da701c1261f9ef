"""What a fleet still holds, or still says, when all pulls are over, and should not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clients.errors import ClientError
from clients.relay import RelayClient
from relay_service.core.instance import State
from relay_service.rpc import convert
from seedrelay.v1 import relay_pb2
from tests.chaos.cast import Actor
from tests.chaos.plan import DIRECTORY, Plan

_CLOSE_WAIT = "08"
"""State of a socket whose peer has closed it, in /proc/net/tcp (include/net/tcp_states.h)."""


async def of_fleet(plan: Plan, cast: dict[str, Actor]) -> list[str]:
    """Lists what is left at each relay, and where the directory's word is not the truth."""
    found: list[str] = []
    hosts = {DIRECTORY: [], **{relay: [] for relay in plan.relays}}
    for engine in (*plan.seeds, *plan.targets):
        if cast[engine.name].alive:
            hosts[engine.relay].append(cast[engine.name])
    for name, engines in hosts.items():
        relay = cast[name]
        if relay.alive:
            found += _held(relay, engines)
            found += await _promised(relay)
    ready = [one for name, engines in hosts.items() if cast[name].alive for one in engines]
    return found + await _wrongly_listed(cast[DIRECTORY], ready)


def _held(relay: Actor, engines: list[Actor]) -> Iterator[str]:
    """Yields memory beyond the arenas of those who are attached, and sockets without a peer."""
    own = {str(Path(f"/proc/{e.pid}/fd/{e.said['fd']}").stat().st_ino) for e in engines}
    for inode, writable in _mapped(relay.pid):
        if writable or inode not in own:
            yield f"{relay.name} maps {'for writing' if writable else 'what nobody has'}"
    for address in _half_closed(relay.pid):
        yield f"{relay.name} keeps a socket that its peer has closed ({address})"


async def _status(relay: Actor) -> relay_pb2.GetRelayStatusResponse:
    async with RelayClient(relay.said["address"]) as client:
        return await client.status()


async def _promised(relay: Actor) -> list[str]:
    try:
        status = await _status(relay)
    except ClientError as error:
        return [f"{relay.name}: {error}"]
    running, leases = len(status.transfers), status.lease_count
    busy = bool(running or leases)
    return [f"{relay.name} has {running} pulls and {leases} leases"] * busy


async def _wrongly_listed(directory: Actor, engines: list[Actor]) -> list[str]:
    """Says whom the directory calls ready who is not, or not with this, and whom it lacks."""
    try:
        known = map(convert.instance_from_proto, (await _status(directory)).instances)
    except ClientError as error:
        return [f"{directory.name}: {error}"]
    listed = {
        (i.instance, i.weights.version, i.weights.digest) for i in known if i.state is State.READY
    }
    ready = {
        (e.name, e.said["version"], e.said["digest"])
        for e in engines
        if e.said["state"] == State.READY
    }
    wrong = listed != ready
    return [f"the directory lists {listed - ready} and lacks {ready - listed}"] * wrong


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
                yield columns[1]
