"""The real model through the real service says what transformers says, in float32."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stage import Stage, reach
from transformers import AutoModelForCausalLM, AutoTokenizer

from clients.engine import EngineClient
from engine_service.checkpoint import smollm2
from seedrelay.v1 import engine_pb2

QUESTIONS = ("Why is the sea salty?", "Write a haiku about seeds.")
TOKENS = 16


@pytest.fixture(scope="module")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in float32, out of the user's cache."""
    return smollm2.fetch("float32").path


@dataclass(frozen=True)
class Expected:
    """What transformers answers."""

    question: str
    prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    text: str


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path) -> list[Expected]:
    """Greedy answers of transformers in float32."""
    torch.set_num_threads(1)
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        made = oracle.generate(
            **prompt, max_new_tokens=TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        begin = prompt["input_ids"].shape[1]
        tokens = made.sequences[0][begin:].tolist()
        rows = torch.log_softmax(torch.cat(made.logits), -1)
        logprobs = rows[range(len(tokens)), tokens].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        answers.append(Expected(question, begin, tokens, logprobs, text))
    return answers


async def test_tokens_equal_transformers(
    stage: Stage, smollm2_folder: Path, expected: list[Expected]
) -> None:
    """Greedy answers equal those of transformers: cold, in chunks, and with a prefix hit.

    Together with others the log-probabilities are the same within what rounding does.
    """
    engine = stage.engine(smollm2_folder, "--prefill-chunk-tokens", "24")
    await reach(engine)
    async with EngineClient(engine.address) as client:
        for one in expected:
            for reused in (False, True):
                chunks = await _ask(client, one.question)
                assert [t for chunk in chunks for t in chunk.token_ids] == one.tokens
                assert "".join(chunk.text for chunk in chunks) == one.text
                usage = chunks[-1].usage
                assert usage.prompt_tokens == one.prompt_tokens
                # The questions share their system prompt: one block, and the next in part.
                assert (usage.cached_tokens >= one.prompt_tokens - 16) == reused
        together = await asyncio.gather(*(_ask(client, one.question) for one in expected * 2))
    for one, chunks in zip(expected * 2, together, strict=True):
        pairs = [(p.token.token_id, p.token.logprob) for chunk in chunks for p in chunk.logprobs]
        for (token, logprob), wanted, like in zip(pairs, one.tokens, one.logprobs, strict=True):
            assert abs(logprob - like) < 1e-3
            if token != wanted:
                break  # a tie: what follows is another answer


async def _ask(client: EngineClient, question: str) -> list[engine_pb2.GenerateResponse]:
    sampling = engine_pb2.SamplingParams(max_tokens=TOKENS, logprobs=0)
    request = engine_pb2.GenerateRequest(sampling=sampling)
    request.chat.messages.add(role="user", content=question)
    return [chunk async for chunk in client.generate(request)]
