"""Ranks, a gate and a relay that update weights without a model, and a loop without waiting."""

# What a method of a twin does, and what it is given, stands in its port.
# ruff: noqa: D102

import asyncio
import dataclasses
import hashlib
import os
import random
from contextlib import asynccontextmanager
from pathlib import Path

from engines import FakeRanks, Service
from fakes import lay_out_bytes, verified

from engine_service.core.load_report import LoadReport
from engine_service.core.messages import Done
from engine_service.core.pause_modes import PauseCounts, PauseMode, PauseReport, PauseRequest
from engine_service.core.ports import FillReport
from engine_service.core.replies import quiet
from engine_service.core.update_messages import (
    Applied,
    ApplyUpdate,
    DropStaging,
    FileIdentity,
    FinishStaging,
    OpenStaging,
    Proven,
    ProveStaged,
    PushedHeader,
    StagedFiles,
    StageDisk,
    StageHeaders,
    StageLent,
    StagePiece,
    UpdateStaged,
)
from engine_service.core.update_request import DiskSource, PushSource, RelaySource, WeightUpdate
from engine_service.core.update_sessions import Caller, UpdateSessions
from engine_service.errors import ArenaError, ProbeMismatch, RankDied
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest
from relay_service.core.pull_report import PathStep, PullOptions

RANKS, SIZES = 2, (3000, 70000)
LAYOUTS = [lay_out_bytes(SIZES, rank) for rank in range(RANKS)]


class Steps:
    """What has been done, in order; fails, or waits, at one of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail_at: int | None = None
        self.error: Exception | None = None
        self.hold_at: int | str | None = None
        self.reached, self.release = asyncio.Event(), asyncio.Event()

    async def step(self, name: str) -> None:
        number = len(self.log)
        self.log.append(name)
        if self.hold_at in (number, name):
            self.reached.set()
            await self.release.wait()
        if self.fail_at == number:
            self.fail_at = None
            raise self.error


def contents_of(seed: bytes) -> list[bytes]:
    """Returns what two ranks hold of weights that come from these bytes."""
    return [
        random.Random(seed + bytes([n])).randbytes(LAYOUTS[n].data_bytes)  # noqa: S311
        for n in range(RANKS)
    ]


def manifests_of(contents) -> list:
    """Returns the manifests of what ranks hold."""
    return [verified(m, c) for m, c in zip(LAYOUTS, contents, strict=True)]


def probe_of(contents) -> bytes:
    """Returns what weights compute."""
    return hashlib.sha256(b"".join(contents)).digest()


class UpdateRanks(FakeRanks):
    """Two ranks whose weights come of the bytes that a source gives them."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        self.arenas_hold = contents_of(b"old")
        self.staged: list[bytes] | None = None
        self.in_place = self.changed = False
        self.pieces: dict[tuple[int, int], bytes] = {}
        self.headers: tuple[PushedHeader, ...] = ()
        self.bad: Exception | None = None
        self._ordered = asyncio.Lock()
        self.lent: list[int] = []
        """Memory for a relay, of the ranks' own."""
        self.staging_progress = [(0, 0)] * RANKS

    async def stage(self, commands, kind):
        assert len(commands) == RANKS
        return await asyncio.shield(quiet(asyncio.ensure_future(self._stage(commands))))

    async def stage_same(self, command, kind):
        return await self.stage([command] * RANKS, kind)

    async def same(self, command, kind):
        await self._steps.step(type(command).__name__)
        match command:
            case ApplyUpdate():
                assert self.staged, "nothing is staged"
                self.arenas_hold, self.staged, self.changed = self.staged, None, False
                return [Applied(10, 0.5)] * RANKS
        raise AssertionError(command)

    async def in_time(self, command, kind, seconds):
        try:
            async with asyncio.timeout(seconds):
                return await self.same(command, kind)
        except TimeoutError:
            raise RankDied("a rank took too long") from None

    async def lend(self):
        await self._steps.step("lend")
        self.close()
        self.lent += [os.memfd_create("lent") for _ in range(RANKS)]
        return [[os.dup(fd)] for fd in self.lent]

    def close(self) -> None:
        """Lets go of memory."""
        while self.lent:
            os.close(self.lent.pop())

    async def _stage(self, commands):
        async with self._ordered:
            await self._steps.step(type(commands[0]).__name__)
            return [self._do(rank, command) for rank, command in enumerate(commands)]

    def _do(self, rank, command):
        match command:
            case OpenStaging():
                assert command.serves == manifests_of(self.arenas_hold)[rank]
                self.staged, self.in_place = list(self.arenas_hold), command.in_place
                self.pieces.clear()
            case StageDisk():
                return self._read(rank, Path(command.folder) / "model.safetensors")
            case StageHeaders():
                self.headers = command.tensors
            case StagePiece():
                self.pieces[command.tensor, command.offset] = command.data
                self._fill(rank, contents_of(self.pushed)[rank])
            case StageLent():
                data = os.pread(self.lent[rank], LAYOUTS[rank].data_bytes, 0)
                assert verified(LAYOUTS[rank], data) == command.landed
                self._fill(rank, data)
            case FinishStaging():
                return self._finished(rank)
            case ProveStaged():
                return self._proven(command.probe)
            case DropStaging():
                self._drop()
        return Done()

    def _read(self, rank: int, path: Path) -> StagedFiles:
        self._fill(rank, contents_of(path.read_bytes())[rank])
        status = path.stat()
        identity = FileIdentity(path.name, status.st_ino, status.st_size, status.st_mtime_ns)
        return StagedFiles((identity,))

    def _proven(self, probe: bytes) -> Proven:
        found = probe_of(self.staged)
        if probe not in (b"", found):
            raise ProbeMismatch("other tokens")
        return Proven(found)

    def _drop(self) -> None:
        self.staged = None
        if self.changed:
            raise ArenaError("those that served are lost", changed="yes")

    @property
    def pushed(self) -> bytes:
        """Bytes of all tensors, in the order of the header."""
        return b"".join(self.pieces[key] for key in sorted(self.pieces))

    def _fill(self, rank: int, data: bytes) -> None:
        self.staged[rank] = data
        if self.in_place:
            self.arenas_hold, self.changed = list(self.staged), True

    def _finished(self, rank: int) -> UpdateStaged:
        if self.bad and rank == 1:
            raise self.bad
        return UpdateStaged(
            manifest=manifests_of(self.staged)[rank], blocks_changed=2, bytes_changed=100 + rank,
            report=LoadReport(bytes_read=7, bytes_held=0, bytes_spilled=0), extra_bytes=64,
            notes=("tied: the head is the embedding",),
        )  # fmt: skip


class FakePauser:
    """A gate that does what `Pauser.applying` says, and lets requests be."""

    def __init__(self, instance, steps: Steps) -> None:
        self._real = instance.pauser
        self._lifecycle, self._engine = instance.lifecycle, instance.engine
        self._steps = steps
        self.asked: list[PauseRequest] = []

    def __getattr__(self, name):
        return getattr(self._real, name)

    @asynccontextmanager
    async def applying(self, request):
        await self._steps.step("pause")
        self.asked.append(request)
        async with self._engine.between_steps():
            before = self._lifecycle.state
            self._lifecycle.to(State.UPDATING)
            try:
                yield PauseReport(
                    requests=PauseCounts(), was_paused=before is State.PAUSED, flushed_blocks=0,
                    seconds=0.25, mode=request.mode,
                )  # fmt: skip
            finally:
                if self._lifecycle.state is State.UPDATING:
                    self._lifecycle.to(before)


class FakeUpdateLink:
    """A relay that knows one other instance."""

    address = "127.0.0.1:1"

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.contents = contents_of(b"of the other")
        self.files = {}
        self.told = 0
        self.reading: list[list[str]] = []
        """Who reads what serves, look by look; nobody when all is said."""
        self.closed: list[tuple[str, bool]] = []
        self.probe = probe_of(self.contents)

    async def stage(self, descriptors, options, on_progress):
        await self._steps.step("link.stage")
        for (fd,), data in zip(descriptors, self.contents, strict=True):
            os.pwrite(fd, data, 0)
        landed = manifests_of(self.contents)
        report = FillReport(
            path=[PathStep(options.source_instance, "127.0.0.1:2")], probe=self.probe,
            weights_digest=weights_digest(landed), source_weights_digest=weights_digest(landed),
        )  # fmt: skip
        return report, landed

    async def source_files(self, report):
        await self._steps.step("link.source_files")
        return self.files

    async def closing(self, version, *, ends_leases=False):
        self.closed.append((version, ends_leases))
        return self.reading.pop(0) if self.reading else []

    async def update(self):
        self.told += 1


class Stand:
    """An instance that serves old weights, and its updates."""

    def __init__(self, root: Path, service: Service | None = None) -> None:
        self.service = service or Service()
        self.instance = self.service.instance
        self.steps = Steps()
        self.ranks = UpdateRanks(self.steps)
        self.instance.ranks = self.service.ranks = self.ranks
        self.instance.engine._runner = self.ranks
        self.instance.manifests = manifests_of(self.ranks.arenas_hold)
        self.instance.probe = probe_of(self.ranks.arenas_hold)
        self.instance.pauser = FakePauser(self.instance, self.steps)
        self.instance.link = FakeUpdateLink(self.steps)
        weights = Weights("v1", weights_digest(self.instance.manifests), 1)
        self.instance.engine.weights = weights
        self.instance.history.serve(weights, "disk:start")
        self.instance.config = dataclasses.replace(self.instance.config, model_root=str(root))
        self.root = root
        self.updates = UpdateSessions(self.instance)

    def folder(self, name: str = "new", data: bytes = b"new", **files: bytes) -> Path:
        """Makes a folder of weights."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(data)
        for file, text in files.items():
            (folder / file).write_bytes(text)
        return folder

    async def update(self, wanted: WeightUpdate, caller: Caller = Caller()):  # noqa: B008
        """Does a whole update, whatever its source."""
        if isinstance(wanted.source, PushSource):
            session = await self.updates.begin(wanted, caller)
            await self.updates.push(session.name, TENSORS, pieces())
            return await session.commit()
        return await self.updates.update(wanted, caller, lambda _: None)

    def __del__(self) -> None:
        self.ranks.close()

    def facts(self) -> dict:
        """Returns all that says which weights serve."""
        instance = self.instance
        return {
            "bytes": list(self.ranks.arenas_hold), "weights": instance.engine.weights,
            "manifests": list(instance.manifests), "probe": instance.probe,
            "codec": instance.codec, "files": instance.files, "state": instance.lifecycle.state,
            "served": [one for one in instance.history.records if one.epoch],
        }  # fmt: skip


TENSORS = (PushedHeader("a", "U8", (5,)), PushedHeader("b", "F32", (2,)))
PUSHED = b"12345abcdefgh"


async def pieces(*wanted: StagePiece):
    """Yields pieces; unless they are named, all of the tensors, out of order."""
    for piece in wanted or (
        StagePiece(1, 4, PUSHED[9:]),
        StagePiece(0, 0, PUSHED[:5]),
        StagePiece(1, 0, PUSHED[5:9]),
    ):
        yield piece


SOURCES = {
    "disk": DiskSource(folder="new"),
    "push": PushSource(),
    "relay": RelaySource(PullOptions(source_instance="other")),
}
BRINGS = {
    "disk": lambda: contents_of(b"new"),
    "push": lambda: contents_of(PUSHED),
    "relay": lambda: contents_of(b"of the other"),
}
"""What ranks hold after an update, by source."""


def wanted(source="disk", version: str = "v2", **changes) -> WeightUpdate:
    """Returns an update; `changes` are fields of it."""
    source = SOURCES[source] if isinstance(source, str) else source
    pause = PauseRequest(mode=PauseMode.RETRACT)
    return WeightUpdate(**{"version": version, "source": source, "pause": pause} | changes)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout=None):
            events = select(0)
            if not events and timeout is None:
                raise AssertionError("everybody waits, and no timer is set")
            if not events:
                self._now += timeout
            return events

        self._selector.select = jump

    def time(self) -> float:
        return self._now


def virtually(work):
    """Runs a coroutine function's work in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())
