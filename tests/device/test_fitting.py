"""All that does not fit is said at once, and numbers lose no bits unless that was asked for."""

import json
import re

import pytest
import torch
from format_cases import rounds
from safetensors.torch import load_file, save_file
from tiny_llama import start_message, write_checkpoint

from engine_service.core.load_report import Conversion
from engine_service.device.rank import Rank
from engine_service.errors import CheckpointError

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
LAYER = "model.layers.1."
ROUTED = {
    "architectures": ["Dots1ForCausalLM"], "num_hidden_layers": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "head_dim": 16,
}  # fmt: skip


def _spoilt(folder):
    """Writes two shards that are wrong in every way at once."""
    tensors = load_file(write_checkpoint(folder) / FILE)
    (folder / FILE).unlink()
    for each in "qkv":
        del tensors[f"{LAYER}self_attn.{each}_proj.weight"]
    tensors |= {f"odd.{number}": torch.ones(1) for number in range(20)}
    tensors[NORM] = torch.ones(65)
    tensors[LAYER + "input_layernorm.weight"] = torch.ones(64, dtype=torch.int32)
    tensors["lm_head.weight"] = tensors[EMBED] + 1
    names = sorted(tensors)
    index = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(names)}
    for shard in set(index.values()):
        part = {name: tensors[name] for name in names if shard in (index[name], "x")}
        save_file(part | {EMBED: tensors[EMBED]}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    """Doubled, missing, unknown, mis-shaped, mis-typed, narrowed, untied; nothing changes."""
    folder = _spoilt(tmp_path)
    rank = Rank(start_message(folder, "bfloat16"))
    with pytest.raises(CheckpointError) as caught:
        rank.load(folder, lambda _done, _total: None, narrow=False)
    words, counts = caught.value.message, caught.value.details["found"]
    assert f"{EMBED} lies in model-1-of-2.safetensors and in model-2-of-2.safetensors" in words
    assert f"missing tensors: {LAYER}self_attn.q_proj.weight, {LAYER}self_attn.k_proj" in words
    assert re.search(r"unknown tensors: (odd\.\d+, ){7}odd\.\d+ and 12 more", words)
    assert f"{NORM} has shape [65], the model needs [64]" in words
    assert f"{LAYER}input_layernorm.weight has dtype I32" in words
    assert "lm_head.weight differs from model.embed_tokens.weight" in words
    assert f"{EMBED} is float32 and would be held as bfloat16" in words
    for one in (
        "1 misplaced tensors", "3 missing tensors", "20 unknown tensors", "1 a head of its own",
        "1 tensors of another shape", "1 tensors of another type",
        "25 tensors that would lose bits",
    ):  # fmt: skip
        assert one in counts.split(", ")
        assert one in words
    assert not any(tensor.any() for tensor in rank.arena.tensors.values())


@pytest.mark.parametrize(
    ("stored", "served", "lossy"),
    [
        (torch.float32, "bfloat16", True), (torch.float32, "float16", True),
        (torch.bfloat16, "float16", True), (torch.float16, "bfloat16", True),
        (torch.float64, "float32", True), (torch.bfloat16, "float32", False),
        (torch.float16, "float32", False), (torch.bfloat16, "bfloat16", None),
    ],
)  # fmt: skip
def test_bits_are_lost_only_where_that_was_asked_for(tmp_path, stored, served, lossy):
    """A narrower type nobody named is refused by name; what is converted is reported."""
    folder = write_checkpoint(tmp_path, dtype=stored)
    asked, unasked = Rank(start_message(folder, served)), Rank(start_message(folder, served))
    report = asked.load(folder, lambda _done, _total: None).report
    own = str(stored).removeprefix("torch.")
    expected = () if lossy is None else (Conversion(own, served, lossy, 29, EMBED),)
    assert report.conversions == expected
    if lossy:
        with pytest.raises(CheckpointError, match=f"{EMBED} is {own} .* {served}"):
            unasked.load(folder, lambda _done, _total: None, narrow=False)
        assert not any(tensor.any() for tensor in unasked.arena.tensors.values())
    else:
        unasked.load(folder, lambda _done, _total: None, narrow=False)
        assert unasked.arena.sealed


@rounds
def test_a_format_that_rounds_counts_as_asked_for(tmp_path):
    """It was named; what it rounds is reported, what it doesn't is held as it is."""
    folder = write_checkpoint(tmp_path, num_hidden_layers=1)
    rank = Rank(start_message(folder, weight_format="int8"))
    report = rank.load(folder, lambda _done, _total: None, narrow=False).report
    first = "model.layers.0.self_attn.q_proj.weight"
    assert report.conversions == (Conversion("float32", "int8", True, 7, first),)


def test_a_router_in_float32_stays_what_it_is(tmp_path):
    """Beside bfloat16 matrices it keeps every bit; one in bfloat16 is widened, and reported."""
    folder = write_checkpoint(tmp_path, dtype=torch.bfloat16, **ROUTED)
    name = "model.layers.0.mlp.gate.weight"
    tensors = load_file(folder / FILE)
    values = torch.full((4, 64), 1 + 2**-20)  # bfloat16 would make it 1
    values[0, 0] = 3 - 2**-20
    for stored, bits in ((values, values), (values.bfloat16(), values.bfloat16().float())):
        save_file(tensors | {name: stored}, folder / FILE)
        rank = Rank(start_message(folder, "bfloat16"))
        report = rank.load(folder, lambda _done, _total: None, narrow=False).report
        assert torch.equal(rank.arena.tensors["layer.0.router"], bits)
        mentioned = any(one.example == name for one in report.conversions)
        assert mentioned == (stored.dtype is torch.bfloat16)
