"""Weights on disk: what must not serve is refused by name, what serves follows no file."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage import Stage, answer, reach, refusal, request

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
        (_quantise, f"{NORM} has dtype F8_E4M3"),
        (_drop, f"missing tensors: {NORM}"),
        (_empty, f"{NORM} has shape [0]"),
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


@pytest.mark.parametrize("by_rename", [False, True])
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
