"""A layer that was compiled ahead of time is taken where it is right, and nowhere else."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from oracles import make
from tiny_llama import Sequence, run, serving_rank, start_message, write_checkpoint

from engine_service.core.step_messages import Row, Sampling
from engine_service.device import compiling, precompiled
from engine_service.device.rank import Rank
from engine_service.device.tolerance import relative_difference, tolerance
from engine_service.errors import CaptureError

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


def _compile(folder, home, dtype="float32", weight_format="auto"):
    return subprocess.run(
        [
            sys.executable, "-m", "clients", "model", "compile", str(folder), "--threads", "1",
            "--dtype", dtype, "--weight-format", weight_format, "--json",
        ],
        env=os.environ | {"XDG_CACHE_HOME": str(home)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tied, tmp_path_factory):
    """A user's cache that has the layer of the tiny model, for one thread and float32."""
    folder = tmp_path_factory.mktemp("cache")
    done = _compile(tied, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def own_cache(cache, tmp_path, monkeypatch):
    """A copy of it, for a test to spoil."""
    shutil.copytree(cache, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _start(folder, compiled, **changes):
    return start_message(folder, kv_block_tokens=16, compiled=compiled, **changes)


def _serving(folder, compiled):
    rank = Rank(_start(folder, compiled))
    rank.load(folder, lambda _done, _total: None)
    rank.capture()
    return rank


def _answers(rank, prompts, steps=12):
    sequences = [Sequence(prompt, first_block=8 * n) for n, prompt in enumerate(prompts)]
    run(rank.step, sequences, steps)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_compiled_layer_says_the_same(tied, own_cache, count):
    """Alone, where an idle row is added, and in a batch; contexts of one block and more."""
    prompts = [[7 + n] * (1 + 9 * n) for n in range(count)]
    traced, compiled = _serving(tied, "off"), _serving(tied, "require")
    assert compiled.graphs.compiled
    assert not traced.graphs.compiled
    assert _answers(compiled, prompts) == _answers(traced, prompts)


@torch.inference_mode()
def test_a_compiled_layer_follows_weights_that_land(tied, tmp_path, own_cache):
    """It was made from another checkpoint, captured on zeros, and reads the arena."""
    other = write_checkpoint(tmp_path / "other", seed=9)
    target, expected = Rank(_start(tied, "require")), _serving(other, "off")
    target.capture()
    for mine, theirs in zip(
        target.arena.tensors.values(), expected.arena.tensors.values(), strict=True
    ):
        mine.copy_(theirs)
    target.arena.seal()
    assert _answers(target, [[3, 1, 4], [1, 5]]) == _answers(expected, [[3, 1, 4], [1, 5]])


def test_an_idle_row_touches_no_block_of_a_request(tied, own_cache):
    """All blocks that a scheduler hands out are as they were, but the one that is written."""
    rank = _serving(tied, "require")
    rank.cache.keys.fill_(3.0)
    sequence = Sequence([5], first_block=2)
    rank.step((sequence.row(),))
    untouched = [n for n in range(64) if n != 2]
    assert (rank.cache.keys[:, untouched] == 3.0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 2, "head_dim": 16},
        {"rms_norm_eps": 1e-3},
        {"intermediate_size": 128},
    ],
)
def test_another_model_finds_none(tmp_path, own_cache, changes):
    """Sizes and constants alike decide: `auto` serves what it traced, `require` says why not."""
    folder = write_checkpoint(tmp_path / "model", **changes)
    assert not _serving(folder, "auto").graphs.compiled
    with pytest.raises(CaptureError, match="has not been compiled") as caught:
        _serving(folder, "require")
    assert "seedrelay model compile" in caught.value.details["hint"]


def test_what_others_may_write_is_not_run(tied, own_cache):
    """It is code."""
    (place,) = (own_cache / "seedrelay" / "compiled").glob("*.so")
    place.chmod(0o666)
    with pytest.raises(CaptureError, match="others may have written"):
        _serving(tied, "auto")


@pytest.mark.parametrize("ending", [".json", ".sha256"])
def test_a_file_that_is_missing_is_named(tied, own_cache, ending):
    """What belongs to a layer is there with it, or the layer is not taken."""
    (path,) = (own_cache / "seedrelay" / "compiled").glob("*" + ending)
    path.unlink()
    with pytest.raises(CaptureError, match=f"{path.name} is missing"):
        _serving(tied, "auto")


def test_a_broken_file_is_refused(tied, own_cache):
    """By name, with what to do."""
    (place,) = (own_cache / "seedrelay" / "compiled").glob("*.so")
    place.write_bytes(place.read_bytes()[:1000])
    with pytest.raises(CaptureError, match="cannot be loaded"):
        _serving(tied, "auto")


def test_a_layer_that_computes_something_else_is_refused(tied, own_cache, monkeypatch):
    """It is proven against the model like any graph, before a request meets it."""
    load = precompiled.load
    monkeypatch.setattr(
        precompiled, "load", lambda place: lambda *inputs: load(place)(*inputs) * 1.01
    )
    with pytest.raises(CaptureError, match="does not compute what eager does"):
        _serving(tied, "auto")


def test_a_failed_compilation_leaves_nothing(tied, tmp_path, monkeypatch):
    """The next start finds no half of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "_compile", lambda *_: (_ for _ in ()).throw(OSError("full")))
    rank = serving_rank(tied, capture=True)
    with pytest.raises(CaptureError, match="cannot be compiled: full"):
        compiling.compile_layer(rank)
    assert not list((tmp_path / "seedrelay" / "compiled").iterdir())


@pytest.mark.full
@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    # A last bit of bfloat16 would decide, layer after layer, which way int8 rounds its input.
    [("packed", "bfloat16"), ("int4", "bfloat16"), ("int8", "float32")],
)
@torch.inference_mode()
def test_a_compiled_layer_reads_what_a_format_holds(
    tied, tmp_path, monkeypatch, weight_format, dtype
):
    """Also what lands after it was captured, where the same bytes say something else."""
    done = _compile(tied, tmp_path / "home", dtype, weight_format)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    other = write_checkpoint(tmp_path / "other", seed=9)
    how = {"dtype": dtype, "weight_format": weight_format}
    target, expected = (Rank(_start(tied, mode, **how)) for mode in ("require", "off"))
    expected.load(other, lambda _done, _total: None, narrow=True)
    for rank in (target, expected):
        rank.capture()
    for mine, theirs in zip(
        target.arena.tensors.values(), expected.arena.tensors.values(), strict=True
    ):
        mine.copy_(theirs)
    target.arena.seal()
    rows = [Sequence([3 + n, 1, 4], first_block=8 * n).row() for n in range(3)]
    target.step(rows)
    expected.step(rows)
    decoded = [Row((7,), 3, row.blocks, 0, Sampling()) for row in rows]
    ours, theirs = target.runner.decode(decoded), expected.runner.decode(decoded)
    assert relative_difference(ours, theirs) <= tolerance(getattr(torch, dtype))


@pytest.mark.parametrize("name", ["mixtral", pytest.param("dots1", marks=pytest.mark.full)])
def test_layers_with_experts_are_not_compiled(tmp_path, monkeypatch, name):
    """They are served as captured, and refused where a compiled layer is required."""
    folder = make(name, tmp_path / "model").folder
    refused = _compile(folder, tmp_path)
    assert (refused.returncode, "experts are not compiled" in refused.stderr) == (1, True)
    assert not _serving(folder, "auto").graphs.compiled
    with pytest.raises(CaptureError, match="experts"):
        Rank(_start(folder, "require")).capture()


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3, biased", "gemma", "yarn"])
def test_other_families_are_compiled_alike(tmp_path, monkeypatch, name):
    """What tells them from Llama is in their graph, and so in what is compiled."""
    oracle = make(name, tmp_path / "model")
    done = _compile(oracle.folder, tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rank = _serving(oracle.folder, "require")
    assert rank.graphs.compiled
    assert _answers(rank, [[1, 2, 3]]) == [oracle.greedy([1, 2, 3], 12)]
