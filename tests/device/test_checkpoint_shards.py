"""Shards are joined by their index, and by nothing else."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import serving_rank, write_checkpoint

from engine_service.errors import CheckpointError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def _shard(folder: Path, **extra: str) -> dict[str, str]:
    """Splits a checkpoint in two and writes the index; `extra` goes into the index."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    index = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(names)}
    for shard in set(index.values()):
        part = {name: tensors[name] for name in names if index[name] == shard}
        save_file(part, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index | extra}))
    return index


def test_shards_load_like_one_file(tmp_path):
    """The index joins the shards, and files that it does not name are ignored."""
    folder = write_checkpoint(tmp_path)
    plain = serving_rank(folder).arena.digested().digest
    _shard(folder)
    save_file({NORM: torch.zeros(64)}, folder / "model-old.safetensors")
    (folder / "model-broken.safetensors").write_bytes(b"junk")
    assert serving_rank(folder).arena.digested().digest == plain


def _lose_shard(folder):
    _shard(folder)
    (folder / "model-2-of-2.safetensors").unlink()


def _two_values(folder):
    index = _shard(folder)
    other = next(shard for shard in index.values() if shard != index[NORM])
    tensors = load_file(folder / other) | {NORM: torch.zeros(64)}
    save_file(tensors, folder / other)


BROKEN_INDEX = {
    "shard absent": (_lose_shard, "model-2-of-2"),
    "tensor in two shards": (_two_values, NORM),
    "tensor absent": (
        lambda f: _shard(f, odd="model-1-of-2.safetensors"),
        "odd does not lie in model-1",
    ),
    "path outside": (lambda f: _shard(f, odd="../model.safetensors"), "not the name of a shard"),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), INDEX),
}


@pytest.mark.parametrize("case", BROKEN_INDEX)
def test_an_index_that_disagrees_is_refused_by_name(tmp_path, case):
    """Missing, doubled or misplaced: the error says which shard or tensor."""
    break_it, named = BROKEN_INDEX[case]
    folder = write_checkpoint(tmp_path)
    break_it(folder)
    with pytest.raises(CheckpointError, match=named):
        serving_rank(folder)


class _Marker:
    """Creates a folder in whoever unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", FILE])
def test_a_pickle_is_never_read(tmp_path, name):
    """Weights that would run code are refused, whatever their file is called."""
    folder, marker = write_checkpoint(tmp_path), tmp_path / "marker"
    (folder / FILE).unlink()
    torch.save(_Marker(marker), folder / name)
    with pytest.raises(CheckpointError, match=FILE):
        serving_rank(folder)
    assert not marker.exists()
    with (folder / name).open("rb") as file:
        torch.load(file, weights_only=False)  # it would have worked
    assert marker.is_dir()
