"""Models of other families are relayed and served like any: through real services."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles import make
from stage import Stage, answer, reach

from engine_service.checkpoint.tokenizer import byte_tokenizer
from seedrelay.v1 import engine_pb2

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = 24
SIZES = {"vocab_size": 320, "max_position_embeddings": 48}


@pytest.mark.parametrize(
    ("name", "ranks", "transport"),
    [
        pytest.param("yarn, all set", 1, "grpc", marks=pytest.mark.full),
        ("qwen2-moe", 2, "shm"),
        pytest.param("llama, biased", 2, "grpc", marks=pytest.mark.full),
        pytest.param("glm4-moe", 1, "shm", marks=pytest.mark.full),
        pytest.param("dots1", 2, "grpc", marks=pytest.mark.full),
    ],
)
async def test_a_target_answers_as_transformers_does(
    stage: Stage, tmp_path: Path, name: str, ranks: int, transport: str
) -> None:
    """A seed from disk, and a target that it fills: the same digests and the oracle's tokens."""
    oracle = make(name, tmp_path / "model", **SIZES)
    byte_tokenizer(256).tokenizer.save(str(oracle.folder / "tokenizer.json"))
    positions = 128 if name.startswith("yarn") else 48  # stretched eight times, from 16
    split = ("--tp", str(ranks), "--dtype", "float32")
    relay = stage.relay()
    seed = stage.engine(oracle.folder, "--relay", relay.address, *split)
    target = stage.target(relay, "--transport", transport, *split)
    seeded, filled = await reach(seed), await reach(target)
    assert [r.digest for r in filled.ranks] == [r.digest for r in seeded.ranks]
    asked = engine_pb2.GenerateRequest(
        tokens=engine_pb2.TokenPrompt(token_ids=PROMPT),
        sampling=engine_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    )
    assert filled.limits.max_context_tokens == seeded.limits.max_context_tokens == positions
    expected = oracle.greedy(PROMPT, TOKENS)
    assert await answer(seed, asked) == await answer(target, asked) == expected
