"""What an engine makes of an arena that its relay has kept: nothing unproven is served."""

import json
import os
from dataclasses import replace

import msgspec
import pytest
from fakes import (
    FORMAT,
    PROBE,
    FakeRunner,
    byte_level_tokenizer,
    random_bytes,
    seam_layout,
    verified,
)

from engine_service.config import EngineConfig
from engine_service.core import reclaim
from engine_service.core.blocks import BlockPool
from engine_service.core.engine import Engine
from engine_service.core.instance import Identity, Instance
from engine_service.core.messages import (
    Allocated,
    Capture,
    Captured,
    CheckProbe,
    Commit,
    Done,
    Restored,
)
from engine_service.core.reclaim import Reclaimer
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.errors import ConfigError, ProbeMismatch, RelayUnreachable, WrongState
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest
from relay_service.core.reclaiming import MAX_KEEP_SECONDS, HandedBack

LAYOUT = seam_layout()
MANIFEST = verified(LAYOUT, random_bytes(LAYOUT))
WEIGHTS = Weights("v7", weights_digest([MANIFEST]), 3)
BLOCKS = LAYOUT.block_count
FILES = {
    "config.json": json.dumps({"vocab_size": 300, "eos_token_id": 250}).encode(),
    "tokenizer.json": byte_level_tokenizer().to_str().encode(),
}
KEEPS = {"relay": "127.0.0.1:1", "instance_name": "one", "keep_arena_seconds": 60.0}


class Ranks(FakeRunner):
    """One rank without a process."""

    def __init__(self) -> None:
        super().__init__()
        self.workers, self.arenas, self.descriptors, self.commands = [None], [], [], []
        self.found = BLOCKS
        self.mismatch = False

    async def allocate(self, _commands) -> None:
        """Has an arena then."""
        self.arenas = [
            Allocated(
                LAYOUT, FORMAT.facts, max_positions=64, address=0, page_kind="", descriptors=1
            )
        ]

    async def restore(self, _manifests, descriptors) -> list[Restored]:
        """Finds as many blocks as it was told."""
        assert all(os.fstat(fd) for fd in descriptors)
        return [Restored(self.found, BLOCKS)]

    async def same(self, command, _kind) -> list:
        """Answers what every command asks for."""
        self.commands.append(type(command))
        if isinstance(command, CheckProbe) and self.mismatch:
            raise ProbeMismatch("it computes something else")
        return [Captured(0.0, 0.0) if isinstance(command, Capture) else Done()]


class Kept:
    """An arena that a relay has kept, and the relay."""

    address = KEEPS["relay"]
    files, model, arena_bytes = FILES, "tiny", LAYOUT.data_bytes

    def __init__(self) -> None:
        self.handed = HandedBack(WEIGHTS, (MANIFEST,), PROBE)
        self.error: Exception | None = None
        self.done: list[str] = []
        self.fd = -1

    async def kept(self, _instance, _started_as):
        """Has kept something, unless it cannot be reached."""
        if isinstance(self.error, RelayUnreachable):
            raise self.error
        return self

    async def take(self, _format, _placement, _manifests):
        """Hands it back, or says why not."""
        if self.error:
            raise self.error
        self.fd = os.memfd_create("kept")
        return self.handed, [self.fd]

    async def let_go(self) -> None:
        """Takes note."""
        self.done.append("let go")

    async def update(self) -> None:
        """Hears of it."""

    def close(self) -> None:
        """Takes note."""
        self.done.append("close")


class Scene:
    """An instance that is started, and what was kept for it."""

    def __init__(self, folder, **changes) -> None:
        self.ranks, self.kept = Ranks(), Kept()
        config = EngineConfig(model=str(folder), listen="127.0.0.1:0", **(KEEPS | changes))
        engine = Engine(Scheduler(Limits(64, 4, 2, 4), BlockPool(32, 4)), self.ranks)
        self.instance = Instance(
            config, Identity("one", "life", "empty"), self.ranks, engine, lambda _: self.kept
        )

    async def run(self) -> bool:
        """Tries to serve what was kept; nothing is left open."""
        served = await Reclaimer(self.instance).run()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(self.kept.fd)
        return served


@pytest.fixture
def scene(tmp_path):
    """An engine in an empty folder."""
    return Scene(tmp_path)


async def test_what_was_kept_is_served(scene):
    """With its version, epoch and digest, once it is proven; the seal comes last."""
    assert await scene.run()
    instance = scene.instance
    assert instance.lifecycle.state is State.READY
    assert instance.engine.weights == WEIGHTS
    assert (instance.manifests, instance.probe, instance.files) == ([MANIFEST], PROBE, FILES)
    assert instance.identity.model == "tiny"
    assert scene.ranks.commands == [Capture, CheckProbe, Commit]
    assert instance.history.records[-1].source == "arena of the former life"
    assert scene.kept.done == ["close"]


def _one_block_less(scene) -> None:
    scene.ranks.found -= 1


def _other_digest(scene) -> None:
    other = msgspec.structs.replace(scene.kept.handed, weights=Weights("v7", "ab" * 16, 3))
    scene.kept.handed = other


def _no_probe(scene) -> None:
    scene.kept.handed = msgspec.structs.replace(scene.kept.handed, probe=b"")


def _another_answer(scene) -> None:
    scene.ranks.mismatch = True


@pytest.mark.parametrize("wrong", [_one_block_less, _other_digest, _no_probe, _another_answer])
async def test_what_is_not_proven_is_not_served(scene, wrong):
    """It can still be filled or loaded, and whoever fills it is told that something lies there."""
    wrong(scene)
    assert not await scene.run()
    assert Commit not in scene.ranks.commands
    assert scene.instance.lifecycle.state is State.STARTING
    assert scene.instance.touched
    assert scene.instance.describe().touched


@pytest.mark.parametrize("error", [WrongState("dtype: other"), RelayUnreachable("gone")])
async def test_what_is_refused_or_out_of_reach(scene, error):
    """The instance is started as it would have been."""
    scene.kept.error = error
    assert not await scene.run()
    assert scene.instance.lifecycle.state is State.STARTING
    assert not scene.instance.touched


async def test_no_room_for_two(scene, monkeypatch):
    """What is kept is let go before the arena of an ordinary start is allocated."""
    monkeypatch.setattr(reclaim, "available_bytes", lambda: LAYOUT.data_bytes - 1)
    assert not await scene.run()
    assert scene.kept.done == ["let go", "close"]
    assert scene.ranks.arenas == []


async def test_a_folder_of_another_model(tmp_path):
    """Its own files are what is served, whatever was kept."""
    own = FILES | {"config.json": b'{"vocab_size": 300, "eos_token_id": 3}'}
    for name, data in own.items():
        (tmp_path / name).write_bytes(data)
    scene = Scene(tmp_path)
    scene.kept.error = WrongState("config.eos_token_id: other")
    assert not await scene.run()
    assert scene.instance.files == own
    with pytest.raises(ConfigError, match=r"another config\.json"):
        await scene.instance.allocate(FILES)


async def test_nobody_is_asked_unless_it_was_wished(tmp_path):
    """Without --keep-arena an engine starts as ever."""
    scene = Scene(tmp_path, keep_arena_seconds=0.0)
    assert not await scene.run()
    assert scene.kept.done == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relay": ""}, "kept by a relay"),
        ({"instance_name": ""}, "by the name of its instance"),
        ({"device": "cuda"}, "memory of the host"),
        ({"keep_arena_seconds": -1.0}, "keep_arena_seconds is -1"),
        ({"keep_arena_seconds": MAX_KEEP_SECONDS + 1}, "keep_arena_seconds is 3601"),
    ],
)
def test_a_wish_that_cannot_work(changes, words):
    """It's refused at the start."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="m", listen="127.0.0.1:0", **(KEEPS | changes))


def test_what_an_engine_was_started_as(tmp_path):
    """Folder, version and source make the difference, not the way to write them."""
    config = EngineConfig(model=str(tmp_path), listen="127.0.0.1:0", weight_version="v7")
    assert replace(config, model=f"{tmp_path}/.", threads=3).started_as == config.started_as
    for change in ({"model": "/elsewhere"}, {"weight_version": "v8"}, {"source": "other"}):
        assert replace(config, **change).started_as != config.started_as
