"""A checkpoint that comes out of order takes the memory of a layer or two, not of the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from format_cases import packs, rounds
from tiny_llama import Filling, write_checkpoint

LAYERS = 8
SHAPE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": LAYERS,
}  # fmt: skip
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Larger pieces are the system's again as soon as they are freed (mallopt(3)): what is counted."""
LAYER_BYTES = 2 * (4 * 512 * 512 + 3 * 512 * 2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of 64 MiB."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(folder, dtype=torch.bfloat16, **SHAPE)


def _shuffled(folder, name, most):
    script = Path(__file__).with_name("shuffled_load.py")
    done = subprocess.run(
        [sys.executable, script, folder, name, str(most)],
        capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | GIVE_BACK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name",
    [
        "fp8", pytest.param("int4", marks=pytest.mark.full),
        pytest.param("int8", marks=[rounds, pytest.mark.full]),
        pytest.param("packed", marks=[packs, pytest.mark.full]),
    ],
)  # fmt: skip
def test_memory_is_bounded_whatever_the_order(folder, name):
    """One layer may wait, a matrix and a band are in work; the rest is in a file: that is why."""
    bounded, unbounded = _shuffled(folder, name, "-"), _shuffled(folder, name, 1 << 40)
    assert (
        bounded["digest"]
        == unbounded["digest"]
        == Filling(folder, name, "bfloat16").expected.digest
    )
    assert bounded["held"] <= LAYER_BYTES
    assert bounded["spilled"] >= (LAYERS - 2) * LAYER_BYTES
    assert bounded["extra"] <= 2 * LAYER_BYTES
    assert unbounded["spilled"] == 0
    assert unbounded["extra"] >= (LAYERS - 2) * LAYER_BYTES
