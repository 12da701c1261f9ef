"""Formats that this engine does not read are refused by tensor and type, before a byte lands."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import start_message, write_checkpoint

from engine_service.device.rank import Rank
from engine_service.errors import CheckpointError, UnsupportedModel

FILE = "model.safetensors"
NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj"
BITS = {
    "BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64,
    "U64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "C64": 64,
}  # fmt: skip
"""Types that safetensors has and that no weight is served from."""


def _retype(path: Path, name: str, dtype: str) -> None:
    """Makes a tensor of another type, all zero, and leaves its shape."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data, values = json.loads(raw[8 : 8 + size]), raw[8 + size :], b""
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        value = data[slice(*entry["data_offsets"])]
        if key == name:
            entry["dtype"] = dtype
            value = bytes(entry["shape"][0] * BITS[dtype] // 8)
        entry["data_offsets"] = [len(values), len(values) + len(value)]
        values += value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


def _refusal(folder: Path) -> str:
    """Returns why a folder's weights are refused; nothing of them has landed."""
    rank = Rank(start_message(folder))
    with pytest.raises(CheckpointError) as refused:
        rank.load(folder, lambda _done, _total: None)
    assert not any(tensor.any() for tensor in rank.arena.tensors.values())
    assert not rank.arena.sealed
    return str(refused.value)


@pytest.mark.parametrize("dtype", BITS)
def test_a_type_that_is_not_served(tmp_path, dtype):
    """The error names the file, the tensor and the type."""
    folder = write_checkpoint(tmp_path)
    _retype(folder / FILE, NORM, dtype)
    assert f"{FILE}: {NORM} has dtype {dtype}, which is not a supported" in _refusal(folder)


def _gptq(tensors):
    weight = tensors.pop(f"{QUERY}.weight")
    tensors[f"{QUERY}.qweight"] = torch.zeros(weight.shape[1] // 8, weight.shape[0]).int()
    tensors[f"{QUERY}.scales"] = torch.ones(1, weight.shape[0])


def _fp8(tensors):
    weight = tensors[f"{QUERY}.weight"]
    tensors[f"{QUERY}.weight"] = weight.to(torch.float8_e4m3fn)
    tensors[f"{QUERY}.weight_scale"] = torch.ones(1)


def _fp8_without_scale(tensors):
    _fp8(tensors)
    del tensors[f"{QUERY}.weight_scale"]


def _bitsandbytes(tensors):
    weight = tensors[f"{QUERY}.weight"]
    tensors[f"{QUERY}.weight"] = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("quantise", "words"),
    [
        (_gptq, f"missing tensors: {QUERY}.weight"),
        (_fp8, f"unknown tensors: {QUERY}.weight_scale"),
        (_fp8_without_scale, f"{QUERY}.weight has dtype F8_E4M3"),
        (_bitsandbytes, f"{QUERY}.weight has shape [2048, 1]"),
    ],
)
def test_quantised_weights_that_the_configuration_hides(tmp_path, quantise, words):
    """Weights that are quantised although config.json does not say so are refused by name."""
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / FILE)
    quantise(tensors)
    save_file(tensors, folder / FILE)
    assert words in _refusal(folder)


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantised_models(tmp_path, method):
    """A configuration that names a way to quantise is refused with it, before memory is taken."""
    folder = write_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"quantization_config.*{method}"):
        Rank(start_message(folder))
