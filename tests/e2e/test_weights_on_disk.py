"""Weights on disk: what must not serve is refused by name, what serves follows no file."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage import (
    LIMIT_SECONDS,
    Stage,
    answer,
    eventually,
    reach,
    refusal,
    request,
    seedrelay,
    status_of,
)

NORM = "model.layers.2.input_layernorm.weight"
Tensors = dict[str, torch.Tensor]


def _poison(tensors: Tensors) -> None:
    tensors[NORM][7] = float("nan")


def _quantise(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM].to(torch.float8_e4m3fn)


def _drop(tensors: Tensors) -> None:
    del tensors[NORM]


def _empty(tensors: Tensors) -> None:
    tensors[NORM] = torch.ones(0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_poison, "not finite"),
        pytest.param(_quantise, f"{NORM} has dtype F8_E4M3", marks=pytest.mark.full),
        pytest.param(_drop, f"missing tensors: {NORM}", marks=pytest.mark.full),
        pytest.param(_empty, f"{NORM} has shape [0]", marks=pytest.mark.full),
    ],
)
async def test_weights_that_must_not_serve(
    stage: Stage, model: Path, tmp_path: Path, spoil: Callable[[Tensors], None], words: str
) -> None:
    """No token is made of them: requests are refused with the reason, and the service ends."""
    folder = tmp_path / "spoilt"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    engine = stage.engine(folder)
    seen = set()
    while engine.process.poll() is None:
        refused = await refusal(engine, request())
        assert refused.code == "UNAVAILABLE"
        seen.add(refused.message)
        await asyncio.sleep(0.05)
    assert any(words in message for message in seen)
    assert engine.wait() == 1
    assert words in engine.log_tail()


def _stated_as(folder: Path, dtype: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))


async def test_a_narrower_type_must_be_named(stage: Stage, model: Path, tmp_path: Path) -> None:
    """float32 tensors in a model that says bfloat16: refused, or converted and said so."""
    folder = tmp_path / "stated"
    shutil.copytree(model, folder)
    _stated_as(folder, "bfloat16")
    refused = stage.engine(folder)
    assert refused.wait() == 1
    assert "model.embed_tokens.weight is float32" in refused.log_tail()
    assert "would be held as bfloat16" in refused.log_tail()
    engine = stage.engine(folder, "--dtype", "bfloat16", "--weight-format", "plain")
    await reach(engine)
    (rank,) = seedrelay("status", engine.address, "--json").json()["ranks"]
    (found,) = rank["load"].pop("conversions")
    tensors = len(load_file(folder / "model.safetensors"))
    first = "model.embed_tokens.weight"
    assert found == {
        "source": "float32", "target": "bfloat16", "lossy": True, "tensors": tensors,
        "example": first,
    }  # fmt: skip
    nbytes = sum(one.nbytes for one in load_file(folder / "model.safetensors").values())
    assert rank["load"] == {"bytes_read": nbytes, "bytes_held": 0, "bytes_spilled": 0}
    words = f"{tensors} tensors float32 → bfloat16 (lossy), first {first}"
    assert words in seedrelay("status", engine.address).out
    assert words in engine.log_tail()


async def test_a_limited_load_is_seen_on_its_way(stage: Stage, model: Path) -> None:
    """It reads no faster than it may, says how far it is meanwhile, and can be ended."""
    nbytes = sum(one.nbytes for one in load_file(model / "model.safetensors").values())
    engine = stage.engine(model, "--read-rate-limit", "1MiB/s")
    seen = set()

    async def is_on_its_way() -> bool:
        progress = (await status_of(engine)).progress
        if progress.phase == "loading" and progress.bytes_total == nbytes:
            seen.add(progress.bytes_verified)
        return len({done for done in seen if 0 < done < nbytes}) > 0

    await eventually(is_on_its_way, LIMIT_SECONDS)
    assert engine.stop() == 0


@pytest.mark.parametrize("by_rename", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_files_that_change_beneath_an_engine(
    stage: Stage, model: Path, make_model: Callable[..., Path], tmp_path: Path, *, by_rename: bool
) -> None:
    """Whoever serves goes on with the weights that were read; who starts then gets the new ones."""
    other = make_model("changed", seed=1, hidden_size=128, layers=4, vocab_size=4096)
    folder = tmp_path / "changing"
    shutil.copytree(model, folder)
    old = stage.engine(folder)
    digest = (await reach(old)).weights_digest
    expected = await answer(old)
    if by_rename:
        shutil.copy(other / "model.safetensors", folder / "new")
        (folder / "new").rename(folder / "model.safetensors")
    else:
        data = (other / "model.safetensors").read_bytes()
        with (folder / "model.safetensors").open("r+b") as file:
            file.write(data)
    assert await answer(old) == expected
    anew, fresh = stage.engine(folder), stage.engine(other)
    assert digest != (await reach(anew)).weights_digest == (await reach(fresh)).weights_digest
    assert await answer(anew) == await answer(fresh) != expected
    assert await answer(old) == expected
