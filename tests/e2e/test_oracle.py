"""The real model through the real service says what transformers says, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stage import Stage, reach
from transformers import AutoModelForCausalLM, AutoTokenizer

from clients.engine import EngineClient
from engine_service.checkpoint import smollm2
from seedrelay.v1 import engine_pb2

QUESTIONS = ("Why is the sea salty?", "Write a haiku about seeds.", "List three prime numbers.")
TOKENS = 32


@pytest.fixture(scope="module")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in float32, out of the user's cache."""
    return smollm2.fetch("float32").path


async def test_tokens_equal_transformers(stage: Stage, smollm2_folder: Path) -> None:
    """Greedy answers to three chats equal those of transformers, prompt and text included."""
    engine = stage.engine(smollm2_folder)
    await reach(engine)
    torch.set_num_threads(1)
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        expected = oracle.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)[0]
        expected = expected[prompt["input_ids"].shape[1] :].tolist()
        request = engine_pb2.GenerateRequest(sampling=engine_pb2.SamplingParams(max_tokens=TOKENS))
        request.chat.messages.add(role="user", content=question)
        async with EngineClient(engine.address) as client:
            chunks = [chunk async for chunk in client.generate(request)]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected
        assert chunks[-1].usage.prompt_tokens == prompt["input_ids"].shape[1]
        said = "".join(chunk.text for chunk in chunks)
        assert said == tokenizer.decode(expected, skip_special_tokens=True)
