"""The commands `fetch` and `random`: what they print and how they end."""

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients.cli_model import app

SMALL = ["--hidden", "32", "--layers", "1", "--vocab", "300"]


def run(*arguments):
    """Runs one command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_random_prints_the_folder_as_json(tmp_path):
    """The object on stdout tells path, bytes and the digest of every file."""
    result = run("random", *SMALL, "--out", tmp_path / "m", "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    path = Path(said["path"])
    assert path == tmp_path / "m"
    files = {p.name: p.read_bytes() for p in path.iterdir() if p.name != "checksums.json"}
    assert said["bytes"] == sum(map(len, files.values()))
    assert said["sha256"] == {n: hashlib.sha256(data).hexdigest() for n, data in files.items()}
    assert "write weights" in result.stderr


def test_random_goes_to_the_cache(tmp_path, monkeypatch):
    """Without --out the folder is in the user's cache, named after its parameters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again = run("random", *SMALL), run("random", *SMALL)
    other = run("random", *SMALL, "--untied")
    assert "made" in first.stdout
    assert "was there" in again.stdout
    assert len(list((tmp_path / "seedrelay" / "models").iterdir())) == 2
    assert other.stdout.startswith(str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["random", "--vocab", "100"],
        ["random", "--size", "many"],
        ["random", "--dtype", "int4"],
        ["random", "--layers", "0"],
        ["fetch", "another"],
        ["fetch"],
    ],
)
def test_wrong_usage_ends_with_2(arguments):
    """Arguments that cannot be are told on stderr."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert not result.stdout


@pytest.mark.usefixtures("no_index")
def test_a_failure_is_told_on_both_streams(tmp_path):
    """It ends with 1; the reason is on stderr, and as an object on stdout."""
    result = run("fetch", "smollm2", "--out", tmp_path / "m", "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "FAILED_PRECONDITION"
    assert error["message"] in result.stderr
    assert "--wheel FILE" in result.stderr
    assert error["details"]["missing"].endswith(".whl")
