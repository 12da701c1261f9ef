"""A folder is made whole or not at all, once, and reused where it is sound."""

import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from engine_service.checkpoint.folder import provide
from engine_service.errors import CheckpointError

RECIPE = {"source": "test", "seed": 1}

HANGS = """
import sys, time
from pathlib import Path
from engine_service.checkpoint.folder import provide

def fill(writer):
    writer.write_text("half.txt", "half")
    print("filling", flush=True)
    time.sleep(600)

provide(Path(sys.argv[1]), {"source": "test", "seed": 1}, fill)
"""


def fill(writer):
    """Writes a small folder."""
    writer.write_text("a.txt", "all of it")
    writer.write_json("b.json", {"b": 1})


def must_not_fill(writer):
    """Stands where a folder must be reused."""
    pytest.fail("made again")


def names(folder):
    """Returns the names of everything in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def test_a_second_call_reuses(tmp_path):
    """A sound folder is returned as it is."""
    first = provide(tmp_path / "m", RECIPE, fill)
    second = provide(tmp_path / "m", RECIPE, must_not_fill)
    assert (first.reused, second.reused) == (False, True)
    assert first.files == second.files
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == ["a.txt", "b.json", "checksums.json"]


@pytest.mark.parametrize("damage", ["another", "short", None])
def test_a_damaged_folder_is_made_anew(tmp_path, damage):
    """A changed, shortened or missing file is noticed and the folder replaced."""
    file = provide(tmp_path / "m", RECIPE, fill).path / "a.txt"
    file.write_text(damage) if damage else file.unlink()
    assert not provide(tmp_path / "m", RECIPE, fill).reused
    assert file.read_text() == "all of it"


def test_what_is_not_ours_stays(tmp_path):
    """Neither another's folder, nor another model, nor a user's file is overwritten."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"holds no readable checksums\.json"):
        provide(theirs, RECIPE, must_not_fill)

    ours = provide(tmp_path / "ours", RECIPE, fill).path
    with pytest.raises(CheckpointError, match="its seed is 1, not 2"):
        provide(ours, {**RECIPE, "seed": 2}, must_not_fill)

    (ours / "a.txt").unlink()
    (ours / "precious.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"damaged, and precious\.txt"):
        provide(ours, RECIPE, must_not_fill)
    assert (theirs / "precious.txt").exists()
    assert (ours / "precious.txt").exists()


def test_a_file_is_in_the_way(tmp_path):
    """A file where the folder belongs is refused with its path."""
    (tmp_path / "m").write_text("a file")
    with pytest.raises(CheckpointError, match="is in the way"):
        provide(tmp_path / "m", RECIPE, must_not_fill)


def test_a_failed_write_leaves_nothing(tmp_path):
    """Where a file cannot be written, the reason is told and nothing stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            provide(tmp_path / "m", RECIPE, lambda w: w.write_text("a.txt", "x" * 100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_a_killed_one_leaves_nothing_half_done(tmp_path):
    """After a kill there is no folder, and the next call clears what was begun."""
    out = tmp_path / "m"
    command = [sys.executable, "-c", HANGS, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"filling\n"
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    assert names(provide(out, RECIPE, fill).path) == ["a.txt", "b.json", "checksums.json"]
    assert names(tmp_path) == ["m"]


def test_many_at_once_make_it_once(tmp_path):
    """Of several at the same time one makes the folder; all get the same."""
    together = Barrier(8)
    filled = []

    def slow_fill(writer):
        filled.append(1)
        fill(writer)

    def ask(_):
        together.wait()
        return provide(tmp_path / "m", RECIPE, slow_fill)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(ask, range(8)))
    assert len(filled) == 1
    assert sum(not folder.reused for folder in folders) == 1
    assert all(folder.files == folders[0].files for folder in folders)
    assert names(tmp_path) == ["m"]
