"""An expert-parallel instance whose ranks are small fakes with real memory: no torch, no processes.

A rank holds units in an arena, takes units out of memory that it is passed, meets others, and
samples tokens that depend on the bytes of every expert: on what they are, not on where they lie.
"""

# What a method of a twin does, and what it is given, stands in what it stands for.
# ruff: noqa: D102

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

from engines import EOS
from fakes import byte_level_tokenizer, verified

from engine_service.config import EngineConfig
from engine_service.core.blocks import BlockPool
from engine_service.core.engine import Engine
from engine_service.core.expert_map import ExpertMap, RankExperts
from engine_service.core.instance import Identity, Instance
from engine_service.core.member_messages import (
    Beat,
    Place,
    Placed,
    ReadUnits,
    Rejoin,
    Taken,
    TakeUnits,
    UnitsRead,
)
from engine_service.core.membership import Membership, MembershipState, members_of
from engine_service.core.messages import Allocated, Capture, Captured, CheckProbe, Done, Start
from engine_service.core.ranks import RankGroup
from engine_service.core.request import Finish, GenerationRequest
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Row, Sampled, Sampling, Step
from engine_service.core.supervisor import Supervisor
from engine_service.core.update_messages import DropStaging
from engine_service.errors import ArenaError, CollectiveFailed, ProbeMismatch, RankDied
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.instance import State, Weights
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.memory.host import HostArena, create_memfd

LAYERS, VOCAB = (0, 2), 300
BLOCK_TOKENS = 4
TIMEOUT_SECONDS = 0.2


def contents(name: str, part: int, nbytes: int, version: str = "v1") -> bytes:
    """Returns what a unit holds, wherever it lies."""
    return random.Random(f"{name} {part} {version}").randbytes(nbytes)  # noqa: S311


def layout(experts: RankExperts, rank: int) -> Manifest:
    """Lays out the arena of a rank; experts of a layer are of one size."""
    units = [("dense", 5000)]
    units += [(f"layer.{n}.expert.{e}", 3000 + n) for n in LAYERS for e in experts.slots(n)]
    specs = [UnitSpec(n, (TensorSpec(f"{n}.w", DType.U8, (s,), logical=n),)) for n, s in units]
    return lay_out(rank, specs)


def filled(manifest: Manifest, part: int, version: str = "v1") -> bytes:
    """Returns the contents of an arena."""
    data = bytearray(manifest.data_bytes)
    for unit in manifest.units:
        drawn = contents(unit.name, part, unit.nbytes, version)
        data[unit.offset : unit.offset + unit.nbytes] = drawn
    return bytes(data)


class World:
    """Where ranks meet, and what happens to them."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.pids = itertools.count(1)
        self.meetings: dict[str, list[FakeRank]] = {}
        self.started: list[FakeRank] = []
        self.on_command: dict[type, list] = {}
        """What is done, once each, when a rank gets a command of a kind."""
        self.disk_version = "v1"
        self.taken: list[str] = []
        """Units that were read from disk."""
        self.stand_ready = list[int]().append
        """Told how many processes shall be ready."""

    def spare(self, rank: int) -> FakeRank:
        worker = FakeRank(self, rank)
        self.started.append(worker)
        return worker


class FakeRank:
    """One rank: worker, process and stream at once."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.pid = world, rank, next(world.pids)
        self.process, self.channel = self, SimpleNamespace(take_descriptors=self._take)
        self.staging = SimpleNamespace(
            rank=rank, progress=(0, 0), send=self._drop, reply=self._done
        )
        self.progress, self.owed, self.returncode = (0, 0), 0, None
        self.hangs = False
        self.commands: list[type] = []
        self.group: list[FakeRank] = []
        self.sealed = False
        self.before: dict[type, Callable[[], Awaitable[None]]] = {}
        """What it does once before it does what a command of a kind says."""
        self._kv: dict[tuple[int, int], bytes] = {}
        """By block and place in it: the experts that computed it."""
        self._answers: asyncio.Queue = asyncio.Queue()
        self._ended = asyncio.Event()
        self._staged: dict[str, tuple[str, bytes]] = {}
        self._tasks: set[asyncio.Task] = set()

    # The process.

    @property
    def has_ended(self) -> bool:
        return self.returncode is not None

    def die(self) -> None:
        """As by SIGKILL."""
        if not self.has_ended:
            self.returncode = -9
            self._ended.set()
            for task in self._tasks:
                task.cancel()
            if self.arena:
                self.arena.close()
                os.close(self.fd)

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode

    def kill(self) -> Kill:
        self.die()
        return Kill()

    async def stop(self) -> None:
        self.die()

    # The stream.

    async def send(self, command, *descriptors: int) -> None:
        if self.has_ended:
            raise RankDied(f"rank {self.rank} has died")
        kept = tuple(map(os.dup, descriptors))
        self.owed += 1
        self.commands.append(type(command))
        for happening in self.world.on_command.pop(type(command), []):
            happening(self)
        task = asyncio.ensure_future(self._answer(command, kept))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Also when it is ended before it has begun.
        task.add_done_callback(lambda _: [os.close(fd) for fd in kept])

    async def reply(self, kind):
        reply = await self._next()
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, kind)
        return reply

    async def settled(self) -> None:
        while self.owed:
            await self._next()
        if self.has_ended:
            raise RankDied("it has ended")

    def call(self, rank: int) -> None:
        self.rank = self.staging.rank = rank

    async def _next(self):
        got, ended = (asyncio.ensure_future(one) for one in (self._answers.get(), self.wait()))
        try:
            await asyncio.wait([got, ended], return_when=asyncio.FIRST_COMPLETED)
            if got.done():
                self.owed -= 1
                return got.result()
            raise RankDied(f"rank {self.rank} (process {self.pid}) has died", rank=str(self.rank))
        finally:
            got.cancel()
            ended.cancel()

    async def _answer(self, command, descriptors) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        try:
            reply = await self._do(command, descriptors)
        except Exception as error:  # noqa: BLE001 - as the worker does
            reply = error
        self._answers.put_nowait(reply)

    # The rank.

    arena: HostArena | None = None

    async def _do(self, command, descriptors):  # noqa: C901, PLR0911 - one line for each
        if before := self.before.pop(type(command), None):
            await before()
        match command:
            case Start():
                return self.begin(command.config.expert_map, command.config.rank)
            case Rejoin():
                return await self._rejoin(command)
            case TakeUnits():
                return self._take_units(command, descriptors[0])
            case ReadUnits():
                return self._read_units(command, descriptors[0])
            case Place():
                return self._place(command)
            case Step():
                return await self._step(command)
            case Capture():
                return Captured(0.0, 0.0)
            case CheckProbe():
                await self._together()
                if command.probe != self.tokens_of(()):
                    raise ProbeMismatch("it computes something else")
                return Done()
            case Beat():
                return Done()
        raise AssertionError(command)

    def begin(self, layers: dict, rank: int, version: str = "") -> Allocated:
        """Allocates; with a version, as if it had served for ever."""
        experts = ExpertMap(1 + max(e for row in layers[LAYERS[0]] for e in row), layers)
        self.experts, self.routes = RankExperts(experts, rank // self.world.parts), False
        self.manifest = layout(self.experts, rank)
        self.fd = create_memfd("fake", self.manifest.data_bytes)
        self.arena = HostArena(self.fd, self.manifest.data_bytes, writable=True)
        self.arena.write_header("life")
        if version:
            self.arena.land(0, filled(self.manifest, rank % self.world.parts, version))
            self.sealed = True
        return Allocated(self.manifest, (("facts", "1"),), 100, 0, "4 KiB", 1, experts)

    def _take(self, _count: int) -> list[int]:
        if self.has_ended:
            raise RankDied("it has ended")
        return [os.dup(self.fd)]

    async def _drop(self, command) -> None:
        assert isinstance(command, DropStaging)

    async def _done(self, _kind) -> Done:
        return Done()

    async def _rejoin(self, command: Rejoin) -> Done:
        self._staged = {k: v for k, v in self._staged.items() if v}
        here = self.world.meetings.setdefault(command.name, [])
        here.append(self)
        self.call(command.rank)
        self.group = here
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while len(here) < command.world_size:
                    if any(one.has_ended for one in here):
                        break
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise CollectiveFailed("a peer did not come in time") from None
        await self._together()
        return Done()

    async def _together(self) -> None:
        """A collective: all are there, or it fails."""
        for _ in range(int(TIMEOUT_SECONDS / 0.001)):
            if any(one.has_ended for one in self.group):
                raise CollectiveFailed("a peer has gone")
            if not any(one.hangs for one in self.group):
                return
            await asyncio.sleep(0.001)
        raise CollectiveFailed("a peer did not come in time")

    def _take_units(self, command: TakeUnits, fd: int) -> Taken:
        memory = HostArena(fd, command.manifest.data_bytes, writable=False)
        there = {unit.name: unit for unit in command.manifest.units}
        here = {unit.name: unit for unit in self.manifest.units}
        taken, total = {}, 0
        try:
            for wanted in command.wanted:
                unit = there[wanted.unit]
                data = bytes(memory.view(unit.offset, unit.nbytes))
                if (block_digest(data),) != wanted.digests or wanted.at not in here:
                    raise ArenaError(f"{wanted.unit} came with other bytes", tensor=wanted.unit)
                taken[wanted.at] = wanted.unit, data
                total += len(data)
        finally:
            memory.close()
        self._staged |= taken
        return Taken(total)

    def _read_units(self, command: ReadUnits, fd: int) -> UnitsRead:
        memory = HostArena(fd, command.manifest.data_bytes, writable=True)
        data, part = bytearray(command.manifest.data_bytes), self.rank % self.world.parts
        for unit in command.manifest.units:
            self.world.taken.append(unit.name)
            drawn = contents(unit.name, part, unit.nbytes, self.world.disk_version)
            data[unit.offset : unit.offset + unit.nbytes] = drawn
        memory.land(0, bytes(data))
        memory.close()
        return UnitsRead(verified(command.manifest, bytes(data)))

    def _place(self, command: Place) -> Placed:
        self.experts = RankExperts(command.experts, command.rank // self.world.parts)
        self.routes = command.routes
        here = {unit.name: unit for unit in self.manifest.units}
        for at, (_name, data) in self._staged.items():
            self.arena.land(here[at].offset, data)
        self._staged, self.sealed = {}, True
        self.manifest = layout(self.experts, command.rank)
        return Placed(self.manifest)

    async def _step(self, command: Step) -> Sampled:
        await asyncio.sleep(0)
        await self._together()
        experts = self.tokens_of(())
        for row in command.rows:
            self._attend(row, experts)
        return Sampled(tuple(map(self._token, command.rows)))

    def _attend(self, row: Row, experts: bytes) -> None:
        """Looks at all KV before the row, and adds its own."""
        end = row.position + len(row.tokens)
        places = [(row.blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in range(end)]
        for place in places[: row.position]:
            assert self._kv.get(place) == experts, "KV that this rank has not, or of other experts"
        self._kv |= dict.fromkeys(places[row.position :], experts)

    def _token(self, row: Row) -> int:
        """Of all tokens so far only the last one counts, and how many there are."""
        if not row.samples:
            return -1
        data = self.tokens_of((row.tokens[-1], row.position + len(row.tokens)))
        return int.from_bytes(data[:2], "little") % EOS

    def tokens_of(self, tokens: tuple[int, ...]) -> bytes:
        """Returns what follows tokens: it depends on every expert, wherever it lies."""
        held = {}
        for rank in self.group:
            assert rank.sealed, "an arena that is not sealed serves"
            part = rank.rank % self.world.parts
            for unit in rank.manifest.units:
                held[part, unit.name] = bytes(rank.arena.view(unit.offset, unit.nbytes))
        for layer, expert, part in itertools.product(
            LAYERS, range(self.experts.map.experts), range(self.world.parts)
        ):
            there = (part, f"layer.{layer}.expert.{expert}") in held
            assert there or self.routes, "a step went through an expert that nobody holds"
        return block_digest(repr(tokens).encode() + b"".join(held[k] for k in sorted(held)))


class Kill:
    """What `kill` returns: a process kills at once, a worker is waited for."""

    def __await__(self):
        return asyncio.sleep(0).__await__()


class FakeSpares:
    """Starts fakes."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def take(self, rank: int) -> FakeRank:
        await asyncio.sleep(0)
        return self._world.spare(rank)

    async def fill(self, count: int) -> None:
        self._world.stand_ready(count)

    async def stop(self) -> None:
        pass


class Elastic:
    """An instance that serves, and who keeps it going."""

    def __init__(self, experts: int, groups: int, parts: int = 1, redundant: int = 0, **settings):
        self.world = world = World(parts)
        settings = {
            "on_rank_loss": "recover", "recovery_deadline_seconds": 10.0,
            "collective_timeout_seconds": TIMEOUT_SECONDS,
        } | settings  # fmt: skip
        config = EngineConfig(
            model="tiny", listen="127.0.0.1:0", tensor_parallel_size=parts,
            expert_parallel_size=groups, redundant_experts=redundant, **settings,
        )  # fmt: skip
        ranks = [FakeRank(world, rank) for rank in range(groups * parts)]
        placed = ExpertMap.linear(experts, list(LAYERS), groups, redundant)
        group = RankGroup(ranks, outlives=config.outlives, spares=FakeSpares(world))
        for rank, one in enumerate(ranks):
            group.arenas.append(one.begin(placed.layers, rank, "v1"))
            group.descriptors.append([os.dup(one.fd)])
            one.group = ranks
        limits = Limits(200, 8, 64, BLOCK_TOKENS)
        scheduler = Scheduler(limits, BlockPool(400, BLOCK_TOKENS))
        self.instance = Instance(
            config, Identity("one", "life", "tiny"), group, Engine(scheduler, group), lambda _: None
        )
        self.instance.experts = placed
        self.instance.manifests = [
            verified(one.manifest, filled(one.manifest, rank % parts))
            for rank, one in enumerate(ranks)
        ]
        digest = weights_digest(self.instance.manifests)
        self.instance.engine.weights = Weights("v1", digest, 1)
        self.instance.probe = ranks[0].tokens_of(())
        self.instance.files = {
            "tokenizer.json": byte_level_tokenizer().to_str().encode(),
            "config.json": b'{"torch_dtype": "float32"}',
        }
        self.instance.lifecycle.state = State.READY
        self.instance.membership = Membership(
            epoch=1, state=MembershipState.WHOLE, members=members_of(ranks, parts)
        )
        self.supervisor = Supervisor(self.instance)
        self.running = asyncio.ensure_future(self.supervisor.run())

    @property
    def ranks(self) -> list[FakeRank]:
        """Those that compute together."""
        return self.instance.ranks.workers

    async def tokens(self, prompt: int = 5, count: int = 12) -> list[int]:
        """Generates to the end."""
        request = GenerationRequest(
            prompt=tuple(range(prompt)), sampling=Sampling(), max_tokens=count
        )
        (sequence,) = self.instance.engine.submit(request)
        found = []
        try:
            while True:
                event = await sequence.events.get()
                if isinstance(event, Exception):
                    raise event
                if event.token is not None:
                    found.append(event.token)
                if event.finish:
                    return found
        finally:
            self.instance.engine.end(sequence, Finish.ABORT)

    async def close(self) -> None:
        """Ends everything."""
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.instance.ranks.stop()
        for one in [*self.ranks, *self.world.started]:
            one.die()
