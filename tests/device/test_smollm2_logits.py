"""The real model's logits are the reference implementation's, in float32."""

import pytest
import torch
from tiny_llama import BLOCK_TOKENS, serving_rank
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_service.checkpoint import smollm2
from engine_service.core.step_messages import Row, Sampling

QUESTIONS = ("Why is the sea salty?", "Write a haiku about seeds.", "List three prime numbers.")
TOKENS = 32
LIMIT = 1e-4
"""Largest difference allowed, as a part of the largest logit."""


@pytest.fixture(scope="module")
def real():
    """Our rank, the reference model and its tokenizer, on one folder."""
    folder = smollm2.fetch("float32").path
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return serving_rank(folder, capture=True), reference, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("question", QUESTIONS)
@torch.inference_mode()
def test_logits_of_32_tokens(real, question):
    """Prefill and 32 replayed decode steps differ by at most 1e-4 of the largest logit."""
    rank, reference, tokenizer = real
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt = asked["input_ids"][0].tolist()
    answer = reference.generate(
        **asked, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False
    )[0].tolist()
    blocks = tuple(range(-(-len(answer) // BLOCK_TOKENS)))
    expected = reference(torch.tensor([answer])).logits[0]
    found = [rank.runner.prefill(Row(tuple(prompt), 0, blocks, 0, Sampling()))[0]]
    for position in range(len(prompt), len(answer)):
        row = Row((answer[position],), position, blocks, 0, Sampling())
        found.append(rank.runner.decode([row])[0])
    assert len(found) == TOKENS + 1
    for ours, theirs in zip(found, expected[len(prompt) - 1 :], strict=True):
        assert float((ours - theirs).abs().max()) <= LIMIT * float(theirs.abs().max())
