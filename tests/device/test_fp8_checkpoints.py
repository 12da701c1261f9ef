"""Checkpoints whose matrices are float8 in blocks: kept where they can be, read where not."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import rank_layer, start_message, write_checkpoint

from engine_service.device.rank import Rank
from engine_service.device.sharding import Shard
from engine_service.errors import CheckpointError, NonFiniteLogits

FILE = "model.safetensors"
LAYER = "model.layers.0."
HEAD = "lm_head.weight"
DOWN = LAYER + "mlp.down_proj.weight"
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
EVEN = {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
    "intermediate_size": 512, "vocab_size": 200, "quantization_config": QUANTISED,
}  # fmt: skip
"""Every part of a fused matrix ends with a block, and so does half of it."""


def write_float8(folder, *, powers=False, **changes):
    """Writes a checkpoint whose layers are float8, with scales that are powers of two or not."""
    write_checkpoint(folder, **(EVEN | changes))
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name], tensors[name + "_scale_inv"] = _quantised(tensors[name], powers)
    save_file(tensors, folder / FILE)
    return folder


def _quantised(weight, powers):
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([math.ceil(size / 128) for size in weight.shape])
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (
                slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128),
            )  # fmt: skip
            scale = float(weight[place].abs().max()) / 448
            scale = 2.0 ** math.ceil(math.log2(scale)) if powers else scale
            values[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
            scales[row, column] = scale
    return values, scales


def _plain(tensors, name):
    """Returns what a float8 matrix stands for, block by block."""
    values, scales = tensors[name].float(), tensors[name + "_scale_inv"]
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            values[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= scales[
                row, column
            ]
    return values


def _loaded(folder, name="fp8", dtype="float32"):
    rank = Rank(start_message(folder, dtype, weight_format=name))
    seen = []
    loaded = rank.load(folder, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (loaded.report.bytes_read,) * 2
    assert rank.arena.digested() == loaded.manifest
    return rank


def _fused(tensors, names, suffix=""):
    return torch.cat([tensors[f"{LAYER}{name}_proj.weight{suffix}"] for name in names])


@pytest.mark.parametrize(("name", "powers"), [("fp8", False), ("fp8", True), ("fp8-ue8m0", True)])
def test_blocks_are_kept_as_they_are(tmp_path, caplog, name, powers):
    """Fused too: numbers and scales are the checkpoint's, to the bit, and nothing is logged."""
    folder = write_float8(tmp_path, powers=powers)
    held, stored = _loaded(folder, name).arena.tensors, load_file(folder / FILE)
    for matrix, parts in {
        "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "output": ("self_attn.o",),
        "gate_up": ("mlp.gate", "mlp.up"), "down": ("mlp.down",),
    }.items():  # fmt: skip
        values, scales = held[f"layer.0.{matrix}"], held[f"layer.0.{matrix}.scale"]
        expected = _fused(stored, parts)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales.float(), _fused(stored, parts, "_scale_inv"))
    assert not caplog.records


@pytest.mark.parametrize("name", ["plain", "fp8"])
@torch.inference_mode()
def test_another_format_reads_what_the_numbers_stand_for(tmp_path, name):
    """Exactly, in float32; a product with blocks is a product with that."""
    folder = write_float8(tmp_path, intermediate_size=200)
    layer = rank_layer(folder, name, torch.float32, Shard())
    expected = _plain(load_file(folder / FILE), DOWN)
    assert torch.equal(layer.down(torch.eye(200)).T, expected)


@pytest.mark.parametrize("ffn", [512, 384, 200])
@torch.inference_mode()
def test_each_of_two_ranks_holds_its_part(tmp_path, ffn, caplog):
    """Cut between two blocks numbers stay as they are; cut through one they are rounded anew."""
    folder = write_float8(tmp_path, intermediate_size=ffn)
    layers = [rank_layer(folder, "fp8", torch.float32, Shard(rank, 2)) for rank in range(2)]
    stored, eye = load_file(folder / FILE), torch.eye(ffn // 2)
    found = torch.cat([layer.down(eye).T for layer in layers], 1)
    expected = _plain(stored, DOWN)
    if ffn == 512:
        assert torch.equal(found, expected)
        assert not caplog.records
    else:
        assert 0 < float((found - expected).norm() / expected.norm()) <= 0.03
        assert "layer.0.down" in caplog.text
    assert torch.equal(layers[0].output.tensors[0].float(), _cut_output(stored))


def _cut_output(stored):
    return stored[LAYER + "self_attn.o_proj.weight"].float()[:, :128]


def test_a_seam_through_a_block_is_rounded_anew_and_logged(tmp_path, caplog):
    """Query, key and value of 64 rows each would share a block; the others are kept."""
    folder = write_float8(tmp_path, head_dim=64, num_hidden_layers=1)
    held, stored = _loaded(folder).arena.tensors, load_file(folder / FILE)
    expected = torch.cat([_plain(stored, f"{LAYER}self_attn.{each}_proj.weight") for each in "qkv"])
    rows = held["layer.0.qkv.scale"].repeat_interleave(128, 0)[: len(expected)]
    found = held["layer.0.qkv"].float() * rows.repeat_interleave(128, 1)
    assert 0 < float((found - expected).norm() / expected.norm()) <= 0.03
    (record,) = caplog.records
    assert record.message == "not the checkpoint's own float8: layer.0.qkv"


def test_scales_between_powers_of_two_are_rounded_anew_and_logged(tmp_path, caplog):
    """A byte of exponent cannot hold them."""
    _loaded(write_float8(tmp_path, num_hidden_layers=1), "fp8-ue8m0")
    assert caplog.text.count("layer.0.") == 4


def test_a_head_may_be_float8_too(tmp_path):
    """It is served in the type of the model."""
    folder = write_float8(tmp_path, tie_word_embeddings=False)
    tensors = load_file(folder / FILE)
    tensors[HEAD], tensors[HEAD + "_scale_inv"] = _quantised(tensors[HEAD], powers=False)
    save_file(tensors, folder / FILE)
    assert torch.equal(_loaded(folder).arena.tensors["head"], _plain(tensors, HEAD))


def test_a_number_that_is_none_never_looks_like_one(tmp_path):
    """NaN among float8 numbers reaches the logits, where it is refused."""
    folder = write_float8(tmp_path)
    tensors = load_file(folder / FILE)
    tensors[DOWN].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, folder / FILE)
    with pytest.raises(NonFiniteLogits):
        _loaded(folder).record_probe()


def _change(name, changed):
    def change(tensors):
        if changed is None:
            del tensors[name]
        else:
            tensors[name] = changed

    return change


E4M3 = torch.float8_e4m3fn
BROKEN = {
    "no scales": (_change(DOWN + "_scale_inv", None), "missing tensors: .*down_proj"),
    "scales of other blocks": (_change(DOWN + "_scale_inv", torch.ones(4, 8)), r"shape \[4, 8\]"),
    "scales of whole numbers": (
        _change(DOWN + "_scale_inv", torch.ones(2, 4, dtype=torch.int32)), "dtype I32",
    ),
    "scales in float8": (_change(DOWN + "_scale_inv", torch.ones(2, 4).to(E4M3)), "dtype F8_E4M3"),
    "scales of an ordinary matrix": (_change(DOWN, torch.ones(256, 512)), "unknown tensors"),
    "the embedding": (
        _change("model.embed_tokens.weight", torch.ones(200, 256).to(E4M3)), "dtype F8_E4M3",
    ),
    "a norm": (_change("model.norm.weight", torch.ones(256).to(E4M3)), "dtype F8_E4M3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, case):
    """Before anything is changed."""
    change, words = BROKEN[case]
    folder = write_float8(tmp_path)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError, match=words):
        _loaded(folder)


def test_settings_of_a_quantised_checkpoint_are_those_of_its_model(tmp_path):
    """A dummy of the ordinary model can be filled from one: the facts are the same."""
    ordinary = write_checkpoint(tmp_path / "ordinary", **(EVEN | {"quantization_config": None}))
    quantised = write_float8(tmp_path / "quantised")
    assert json.loads((quantised / "config.json").read_text())["quantization_config"]
    ranks = [Rank(start_message(one, weight_format="fp8")) for one in (ordinary, quantised)]
    assert ranks[0].facts == ranks[1].facts
