"""Tiny checkpoints, and a rank that serves one, for all tests of the device ring."""

import gc
from pathlib import Path

import pytest
from tiny_llama import serving_rank, write_checkpoint
from updated_service import Served

from engine_service.device.rank import Rank


@pytest.fixture(scope="session")
def tied(tmp_path_factory) -> Path:
    """A tiny checkpoint whose head is the embedding."""
    return write_checkpoint(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> Path:
    """A tiny checkpoint with a head of its own, one key-value head and odd head size."""
    folder = tmp_path_factory.mktemp("untied")
    return write_checkpoint(
        folder, tie_word_embeddings=False, num_key_value_heads=1, head_dim=24, rope_theta=500.0
    )


@pytest.fixture(scope="session")
def captured(tied) -> Rank:
    """A rank with a captured graph; tests must leave it as it is."""
    return serving_rank(tied, capture=True)


@pytest.fixture(scope="module", autouse=True)
def _collected():
    """Frees the arenas of a file's ranks: they hang in cycles that Python hardly looks for."""
    yield
    gc.unfreeze()  # a worker freezes what it finds, garbage too
    gc.collect()
    gc.freeze()  # as it was before: what is left lives on


@pytest.fixture
async def serving():
    """Starts services whose weights can be updated."""
    async with Served() as serving:
        yield serving
