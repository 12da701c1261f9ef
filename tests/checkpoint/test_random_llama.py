"""Random checkpoints: reproducible, of the shape asked for, and loadable by others."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine_service.checkpoint.random_llama import RandomLlama, make
from engine_service.checkpoint.random_shape import ShapeWish, parse_size
from engine_service.errors import ConfigError

SMALL = ShapeWish(hidden_size=32, head_dim=8, layers=3, vocab_size=300).shape("float32")


def weights_of(folder):
    """Returns all tensors of a folder."""
    tensors = {}
    for path in folder.path.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_a_seed_gives_the_same_bytes(tmp_path):
    """Equal parameters give equal files, another seed gives other weights."""
    first = make(RandomLlama(shape=SMALL, seed=7), tmp_path / "a")
    second = make(RandomLlama(shape=SMALL, seed=7), tmp_path / "b")
    other = make(RandomLlama(shape=SMALL, seed=8), tmp_path / "c")
    assert first.files == second.files
    assert first.files["model.safetensors"] != other.files["model.safetensors"]


def test_values_do_not_depend_on_what_surrounds_them(tmp_path):
    """Shards, more layers and the dtype leave a tensor's values as they are."""
    plain = weights_of(make(RandomLlama(shape=SMALL), tmp_path / "a"))
    sharded = weights_of(make(RandomLlama(shape=SMALL, shard_bytes=9000), tmp_path / "b"))
    rounded = weights_of(make(RandomLlama(shape=SMALL, dtype="bfloat16"), tmp_path / "c"))
    untied = weights_of(make(RandomLlama(shape=replace(SMALL, tied=False)), tmp_path / "d"))
    assert plain.keys() == sharded.keys() == rounded.keys()
    assert untied.keys() - plain.keys() == {"lm_head.weight"}
    for name, values in plain.items():
        assert torch.equal(values, sharded[name])
        assert torch.equal(values, untied[name])
        assert torch.equal(values.to(torch.bfloat16), rounded[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_file_is_what_the_library_writes(tmp_path, dtype):
    """The safetensors package would write the same tensors to the same bytes."""
    folder = make(RandomLlama(shape=SMALL, dtype=dtype), tmp_path / "m")
    path = folder.path / "model.safetensors"
    save_file(load_file(path), tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "theirs").read_bytes() == path.read_bytes()


def test_the_index_names_the_shard_of_every_tensor(tmp_path):
    """Each tensor is in the file that the index names, and no shard is too large."""
    folder = make(RandomLlama(shape=SMALL, shard_bytes=20_000), tmp_path / "m")
    index = json.loads((folder.path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    held = {}
    for name in folder.files:
        if name.endswith(".safetensors"):
            with safe_open(folder.path / name, "pt") as file:
                held |= dict.fromkeys(file.keys(), name)
    assert held == index["weight_map"]
    tensors = weights_of(folder)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == SMALL.tensor_shapes
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name in set(held.values()):
        inside = [tensors[tensor].nbytes for tensor in held if held[tensor] == name]
        assert sum(inside) <= 20_000 or len(inside) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_runs_it(tmp_path, tied):
    """Loaded by transformers it lacks no tensor; its logits are finite and spread."""
    folder = make(RandomLlama(shape=replace(SMALL, tied=tied)), tmp_path / "m")
    model, info = LlamaForCausalLM.from_pretrained(folder.path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model(torch.arange(64)[None]).logits
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize("text", ["1MiB", "20MiB", "2GiB"])
def test_a_size_is_reached_with_few_layers_more(text):
    """The weights have at least the size, and at most a layer more."""
    shape = ShapeWish(size_bytes=parse_size(text)).shape("bfloat16")
    nbytes = 2 * sum(math.prod(dims) for dims in shape.tensor_shapes.values())
    assert parse_size(text) <= nbytes < parse_size(text) * 1.13


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"vocab_size": 258}, "the tokenizer needs 259"),
        ({"heads": 6, "kv_heads": 4}, "cannot share"),
        ({"head_dim": 5}, "is odd"),
        ({"layers": 3, "size_bytes": 1 << 20}, "give one of both"),
    ],
)
def test_impossible_shapes_are_refused(wish, message):
    """What no Llama can be is refused in words."""
    with pytest.raises(ConfigError, match=message):
        ShapeWish(**wish).shape("float32")


@pytest.mark.parametrize("text", ["", "GiB", "0", "3XB", "-1MiB"])
def test_sizes_that_are_none(text):
    """A size is a positive number with a unit."""
    with pytest.raises(ConfigError, match="a size is"):
        parse_size(text)
