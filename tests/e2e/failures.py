"""A fleet whose processes are killed, stopped and started again, and what they hold."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stage import DUMMY, Stage, answer, eventually, reach, status_of

from clients.engine import EngineClient
from clients.errors import ClientError
from clients.launch import Service
from clients.relay import RelayClient
from relay_service.rpc import convert
from seedrelay.v1 import relay_pb2, weights_pb2

RATE = 10 << 20
"""Bytes per second of a throttled pull: a tenth of a second a block."""
LEASE_LIMIT_SECONDS = 40.0
"""An unused lease ends after 30 seconds, and 5 after its reader broke off."""


class Cast:
    """Three relays on loopback, of which one is the directory, and a seed on two of them.

    `a` is the seed of another host, `b` the one beside the target. The relay of `a` gives
    no more than a throttled pull takes, so that what a pull lacks lies at its source and
    not in a buffer on the way.
    """

    def __init__(self, stage: Stage, model: Path) -> None:
        self.stage = stage
        self.model = model
        self.roles: dict[str, Service] = {"directory": stage.relay()}
        for role in ("seed_relay", "target_relay"):
            self.roles[role] = self._relay(role)
        for role, name, relay in (("seed", "a", "seed_relay"), ("neighbour", "b", "target_relay")):
            self.roles[role] = self._seed(name, relay)

    async def ready(self) -> None:
        """Waits until every seed serves and every relay is known to the directory."""
        for role in ("seed", "neighbour"):
            status = await reach(self.roles[role])
            self.digest = status.weights_digest
        await self.whole()
        self.tokens = await answer(self.roles["seed"])

    async def whole(self) -> None:
        """Waits until the directory lists the two seeds and nobody else as ready."""

        async def both() -> bool:
            listed = (await relay_status(self.roles["directory"])).instances
            ready = weights_pb2.INSTANCE_STATE_READY
            return sorted(one.instance for one in listed if one.state == ready) == ["a", "b"]

        await eventually(both)

    async def restore(self, role: str) -> None:
        """Starts what was killed again, at its address, and lets what was stopped go on."""
        service = self.roles[role]
        if service.process.poll() is None:
            for pid in service.processes():
                os.kill(pid, signal.SIGCONT)
        elif role == "seed":
            self.roles[role] = self._seed("a", "seed_relay")
            await reach(self.roles[role])
        elif role == "neighbour":
            self.roles[role] = self._seed("b", "target_relay")
            await reach(self.roles[role])
        elif role == "directory":
            self.roles[role] = self.stage.relay_again(service)
        else:
            self.roles[role] = self._relay(role, service.address)

    async def unleased(self) -> None:
        """Waits until nobody holds a lease any more: dead readers' leases end by themselves.

        Every relay must know it too: who is asked first depends on it.
        """
        for role in ("seed_relay", "target_relay"):
            await eventually(lambda role=role: no_leases(self.roles[role]), LEASE_LIMIT_SECONDS)

        async def known() -> bool:
            seen = (await relay_status(self.roles["target_relay"])).instances
            return not any(convert.instance_from_proto(one).leases for one in seen)

        await eventually(known)

    async def dummy(self) -> Service:
        """Starts a target that waits to be filled."""
        target = self.stage.engine(self.model, "--load-format", "dummy")
        await reach(target, DUMMY)
        return target

    def _relay(self, role: str, listen: str = "127.0.0.1:0") -> Service:
        limit = ("--egress-limit", str(RATE)) if role == "seed_relay" else ()
        return self.stage.relay("--join", self.roles["directory"].address, *limit, listen=listen)

    def _seed(self, name: str, relay: str) -> Service:
        return self.stage.engine(
            self.model, "--relay", self.roles[relay].address, "--instance-name", name,
            "--weight-version", "v4",
        )  # fmt: skip


@dataclass
class Outcome:
    """How a pull ended: with a report, or with an error."""

    report: weights_pb2.PullReport = field(default_factory=weights_pb2.PullReport)
    error: ClientError | None = None

    @property
    def path(self) -> list[tuple[str, str]]:
        """Sources that were tried and why each was left."""
        assert self.error is None, self.error
        return [(s.source_instance, s.reason) for s in self.report.path]

    @property
    def bytes_wasted(self) -> int:
        """Bytes that were read though they were there already, or again."""
        good = sum(step.bytes_verified for step in self.report.path)
        assert self.report.bytes_moved - self.report.bytes_reread == good
        return self.report.bytes_reread


Filling = asyncio.Task[Outcome]


def start_pull(
    target: Service, relay: Service, source: str = "", transport: str = "", **options: int
) -> Filling:
    """Fills a dummy in the background."""
    wanted = weights_pb2.PullOptions(source_instance=source, transport=transport, **options)

    async def fill() -> Outcome:
        async with EngineClient(target.address) as client:
            try:
                *_, last = [message async for message in client.pull(relay.address, wanted)]
            except ClientError as error:
                return Outcome(error=error)
        return Outcome(last.report)

    return asyncio.create_task(fill())


async def relay_status(relay: Service) -> relay_pb2.GetRelayStatusResponse:
    """Returns what a relay says."""
    async with RelayClient(relay.address) as client:
        return await client.status()


async def halfway(relay: Service, percent: int) -> weights_pb2.PullProgress:
    """Waits until the pull on a relay has verified so much, and not everything yet."""
    async with RelayClient(relay.address) as client, asyncio.timeout(30):
        while True:
            for transfer in (await client.status()).transfers:
                at = transfer.progress
                if at.bytes_total and at.bytes_verified * 100 >= at.bytes_total * percent:
                    assert at.bytes_verified < at.bytes_total, "the point was missed"
                    return at


async def no_leases(relay: Service) -> bool:
    """Returns whether nobody holds a lease at a relay."""
    return (await relay_status(relay)).lease_count == 0


def runs(pid: int) -> bool:
    """Returns whether a process exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def held(service: Service) -> dict[int, Counter[str]]:
    """Counts memory files, mappings of them and sockets of each process of a service."""
    return {pid: _held(pid) for pid in service.processes()}


def _held(pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = str(fd.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        found["memfd"] += "memfd:" in link
        found["socket"] += link.startswith("socket:")
    found["mapped"] = len(_arenas(pid, writable=False))
    return found


def _arenas(pid: int, *, writable: bool) -> list[str]:
    """Lists the memory files that a process maps, by device and inode (proc(5), maps)."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [
        f"{line[3]}:{line[4]}"
        for line in lines
        if len(line) > 5 and "memfd:seedrelay-rank" in line[5] and (not writable or "w" in line[1])
    ]


def writers(engine: Service, others: list[Service]) -> list[int]:
    """Lists the processes that map the arena of an engine for writing."""
    _, worker = engine.processes()
    (arena,) = set(_arenas(worker, writable=True))
    pids = [pid for service in [engine, *others] for pid in service.processes()]
    return [pid for pid in pids if arena in _arenas(pid, writable=True)]


async def assert_serves(target: Service, cast: Cast) -> None:
    """Checks that a target serves the seeds' weights, and that only its rank can write them."""
    status = await status_of(target)
    assert status.state == weights_pb2.INSTANCE_STATE_READY, status.reason
    assert (status.weights_digest, status.weight_version) == (cast.digest, "v4")
    assert await answer(target) == cast.tokens
    alive = [one for one in cast.roles.values() if one.process.poll() is None]
    assert writers(target, alive) == [status.ranks[0].pid]


async def lets_go(service: Service, before: dict[int, Counter[str]]) -> None:
    """Waits until a service holds no more than before: the same memory, and no further socket."""

    def more() -> list[Counter[str]]:
        now = held(service)
        assert now.keys() == before.keys()
        memory = [n[k] != before[p][k] for p, n in now.items() for k in ("memfd", "mapped")]
        return [n for p, n in now.items() if any(memory) or n["socket"] > before[p]["socket"]]

    await settles(more, [])


async def settles(read: Callable[[], object], expected: object) -> None:
    """Waits until something is as it was; shows the difference when it stays another."""
    try:
        await eventually(lambda: read() == expected)
    except AssertionError:
        raise AssertionError(f"{read()} stays other than {expected}") from None
