"""`seedrelay update` and `versions` against an engine without a model, over a real socket."""

import asyncio
import json
import struct

import pytest
from typer.testing import CliRunner
from updates import Stand, contents_of, wanted

from clients.cli import app
from clients.safetensors_files import read_folder
from engine_service.core.pause_modes import PauseMode
from engine_service.core.update_sessions import Caller
from engine_service.errors import CheckpointError
from relay_service.core.manifest import weights_digest


@pytest.fixture
def stand(service, tmp_path):
    """An engine that serves old weights."""
    stand = Stand(tmp_path, service)
    stand.folder()
    service.servicer._updates = stand.updates
    return stand


async def seedrelay(stand, *arguments: str):
    """Runs a command beside the engine's event loop."""
    command, *others = arguments
    line = [command, "--engine", stand.service.address, *others]
    return await asyncio.to_thread(CliRunner().invoke, app, line)


def safetensors(**tensors: bytes) -> bytes:
    """Returns a file of `U8` tensors."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, data in tensors.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


async def test_an_update_from_disk(stand):
    """Every option reaches the engine, and the report is one object of JSON."""
    options = ("--mode", "wait", "--finish-within", "2.5", "--on-deadline", "abort",
               "--operator", "me", "--no-clear-cache", "--wait", "3",
               "--rate-limit", "64MiB/s")  # fmt: skip
    base = stand.instance.engine.weights.digest
    done = await seedrelay(
        stand, "update", "--from", "disk:new", "--version", "v2", "--base-digest", base,
        *options, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    digest = weights_digest(stand.instance.manifests)
    assert (shown["weight_version"], shown["weights_digest"], shown["epoch"]) == ("v2", digest, 2)
    assert (shown["bytes_changed"], shown["state"], shown["cache_kept"]) == (201, "READY", True)
    assert shown["seconds_paused"] >= 0.25
    assert set(shown["requests"]) == {"paused", "aborted", "retracted", "finished", "waiting"}
    assert [rank["bytes_changed"] for rank in shown["ranks"]] == [100, 101]
    pause = stand.instance.pauser.asked[0]
    assert (pause.mode, pause.deadline_seconds, pause.on_deadline, pause.clear_cache) == (
        PauseMode.WAIT, 2.5, PauseMode.ABORT, False,
    )  # fmt: skip
    assert pause.operator == "me"
    listed = json.loads((await seedrelay(stand, "versions", "--json")).stdout)["versions"]
    assert [(one["weight_version"], one["result"]) for one in listed] == [
        ("v1", "served"),
        ("v2", "serves"),
    ]
    assert (listed[1]["operator"], listed[1]["pause_mode"]) == ("me", "wait")


async def test_a_folder_that_is_pushed(stand, tmp_path):
    """Shards are read here, without torch, and sent."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(safetensors(x=b"12345", empty=b""))
    (folder / "b.safetensors").write_bytes(safetensors(y=b"678"))
    done = await seedrelay(stand, "update", "--from", f"push:{folder}", "--version", "v2")
    assert done.exit_code == 0, done.output
    assert stand.ranks.arenas_hold == contents_of(b"12345678")
    assert "READY: weights v2" in done.stdout
    assert [header.name for header in stand.ranks.headers] == ["x", "empty", "y"]
    index = {"weight_map": {"y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [(one.name, bytes(one.data)) for one in read_folder(folder)] == [("y", b"678")]


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xff" * 64, safetensors(x=b"12345")[:-1], b"\x80\x04pickled" * 9]
)
async def test_a_file_that_is_broken(stand, tmp_path, data):
    """It is refused before the engine hears of it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(data)
    done = await seedrelay(stand, "update", "--from", f"push:{folder}", "--version", "v2", "--json")
    assert (done.exit_code, stand.steps.log) == (1, [])
    assert "cannot be read" in json.loads(done.stdout)["error"]["message"]


async def test_an_update_that_is_refused(stand):
    """The reason on stderr, and as JSON; the history has it."""
    stand.ranks.bad = CheckpointError("layer 1 is torn", tensor="x")
    done = await seedrelay(stand, "update", "--from", "disk:new", "--version", "v2", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["code"]) == (1, "INVALID_ARGUMENT")
    assert (error["message"], error["details"]["tensor"]) == ("layer 1 is torn", "x")
    assert "layer 1 is torn" in done.stderr
    assert "failed  v2" in (await seedrelay(stand, "versions")).stdout


@pytest.mark.parametrize("source", ["new", "disk:", "tape:x"])
async def test_a_source_that_is_none(stand, source):
    """Wrong usage."""
    done = await seedrelay(stand, "update", "--from", source, "--version", "v2")
    assert (done.exit_code, stand.steps.log) == (2, [])


async def test_a_label(stand):
    """The weights that serve are called otherwise."""
    done = await seedrelay(stand, "versions", "--set", "best", "--json")
    assert json.loads(done.stdout)["former_weight_version"] == "v1"
    assert stand.instance.engine.weights.version == "best"


async def test_a_session_that_is_in_the_way(stand):
    """An operator ends it by the name that the status shows; twice is no error."""
    session = await stand.updates.begin(wanted(), Caller())
    for aborted in (1, 0):
        done = await seedrelay(stand, "abort", "--update", session.name, "--json")
        assert (done.exit_code, json.loads(done.stdout)) == (0, {"aborted": aborted})
    assert stand.updates.current is None
    both = await seedrelay(stand, "abort", "--update", session.name, "--all")
    assert both.exit_code == 2
