"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failures import Cast
from stage import Fleet, Stage, reach

from engine_service.checkpoint import random_llama
from engine_service.checkpoint.random_shape import ShapeWish


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage of one test."""
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny random checkpoints; equal wishes give equal weights."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str, seed: int = 0, dtype: str = "float32", **wish: Any) -> Path:
        folder = root / name
        if not folder.exists():
            shape = ShapeWish(**wish).shape(dtype)
            random_llama.make(random_llama.RandomLlama(shape=shape, dtype=dtype, seed=seed), folder)
        return folder

    return make


@pytest.fixture(scope="session")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A relay and a ready seed for all tests that leave them as they are."""
    stage = Stage(tmp_path_factory.mktemp("fleet"))
    relay = stage.relay()
    seed = stage.engine(
        model, "--relay", relay.address, "--instance-name", "seed", "--weight-version", "v9"
    )
    asyncio.run(reach(seed))
    yield Fleet(relay, seed)
    stage.close()


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path]) -> Path:
    """The tiny model of most tests: tied, float32, a few MiB."""
    return make_model("tiny", hidden_size=128, layers=4, vocab_size=4096)


@pytest.fixture(scope="session")
def cast(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cast]:
    """A fleet for the tests of failures: each puts back what it broke."""
    model = make_model("cast", hidden_size=256, size_bytes=16 << 20, max_positions=256)
    stage = Stage(tmp_path_factory.mktemp("cast"))
    try:
        cast = Cast(stage, model)
        asyncio.run(cast.ready())
        yield cast
        asyncio.run(cast.unleased())
    finally:
        stage.close()
