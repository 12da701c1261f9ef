"""The model computes what the reference implementation computes."""

import pytest
import torch
from tiny_llama import Sequence, run, serving_rank

from engine_service.core.step_messages import Row, Sampling

PROMPTS = ([5], [1, 2, 3], [(7 * i) % 199 for i in range(40)], [9] * 17)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request):
    """Our rank and the reference model on the same checkpoint."""
    from transformers import LlamaForCausalLM

    folder = request.getfixturevalue(request.param)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return serving_rank(folder, capture=True), reference


@torch.inference_mode()
def _difference(expected, found) -> float:
    return float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_prefill_logits_equal_the_reference(pair, prompt):
    """Logits after a prompt are within 1e-4 of the largest one."""
    rank, reference = pair
    expected = reference(torch.tensor([prompt])).logits[0, -1]
    found = rank.runner.prefill(Sequence(prompt).row())[0]
    assert _difference(expected, found) < 1e-4


@torch.inference_mode()
def test_chunked_prefill_equals_the_reference(pair):
    """A prompt in pieces attends to its earlier pieces, across block borders."""
    rank, reference = pair
    prompt = PROMPTS[2]
    for start, end in ((0, 5), (5, 19), (19, 40)):
        row = Row(tuple(prompt[start:end]), start, tuple(range(8)), 0, Sampling())
        found = rank.runner.prefill(row)[0]
    expected = reference(torch.tensor([prompt])).logits[0, -1]
    assert _difference(expected, found) < 1e-4


@torch.inference_mode()
def test_mixed_decode_logits_equal_the_reference(pair):
    """Decoding several sequences of different lengths together changes none of them."""
    rank, reference = pair
    sequences = [Sequence(p, first_block=8 * i) for i, p in enumerate(PROMPTS)]
    run(rank.runner.step, sequences, 4)
    found = rank.runner.decode([sequence.row() for sequence in sequences])
    for sequence, logits in zip(sequences, found, strict=True):
        expected = reference(torch.tensor([sequence.tokens])).logits[0, -1]
        assert _difference(expected, logits) < 1e-4


@torch.inference_mode()
def test_greedy_tokens_equal_the_reference(pair):
    """32 greedy tokens are the same."""
    rank, reference = pair
    sequence = Sequence(PROMPTS[1])
    run(rank.runner.step, [sequence], 32)
    tokens = list(PROMPTS[1])
    for _ in range(32):
        tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert sequence.tokens == tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tied, dtype):
    """Half precision gives finite logits near those of float32."""
    full, half = serving_rank(tied), serving_rank(tied, dtype, capture=True)
    row = Sequence(PROMPTS[2]).row()
    with torch.inference_mode():
        assert _difference(full.runner.prefill(row), half.runner.prefill(row)) < 5e-2
    sequence = Sequence(PROMPTS[1])
    run(half.runner.step, [sequence], 8)
    assert len(sequence.output) == 8


def test_rotary_tables_are_part_of_the_arena(tied):
    """The tables are finite, cover every position and are declared as a buffer."""
    rank = serving_rank(tied)
    unit = next(unit for unit in rank.arena.manifest.units if unit.name == "rotary")
    assert [(t.name, t.kind, t.shape) for t in unit.tensors] == [
        ("rotary.cos", "buffer", (128, 8)), ("rotary.sin", "buffer", (128, 8)),
    ]  # fmt: skip
    cos, sin = rank.model.embedding.cos, rank.model.embedding.sin
    assert torch.allclose(cos**2 + sin**2, torch.ones(128, 8))
    assert rank.arena.holds(cos)


def test_garbage_of_another_sequence_does_not_leak(captured):
    """A NaN left in a freed block, or in one that pads a table, reaches nobody."""
    clean = [Sequence([1, 2, 3]), Sequence([4] * 20, first_block=8)]
    run(captured.runner.step, clean, 6)
    captured.cache.keys[:, :32].fill_(float("nan"))
    captured.cache.values[:, :32].fill_(float("nan"))
    again = [Sequence([1, 2, 3]), Sequence([4] * 20, first_block=8)]
    run(captured.runner.step, again, 6)
    captured.cache.keys.zero_()
    captured.cache.values.zero_()
    assert [s.output for s in again] == [s.output for s in clean]


@pytest.mark.parametrize("cuts", [(40,), (39, 40), (1, 2, 40), (16, 32, 40)])
def test_log_probabilities_of_a_prompt(pair, cuts):
    """However a prompt is cut, its tokens have the reference's log-probabilities."""
    rank, reference = pair
    prompt = PROMPTS[2]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits, -1)[range(39), prompt[1:]]
    sampling = Sampling(prompt_logprobs=2, logprobs=1)
    found = []
    for start, end in zip((0, *cuts[:-1]), cuts, strict=True):
        following = tuple(prompt[start + 1 : end + 1])
        row = Row(
            tuple(prompt[start:end]), start, tuple(range(8)), 0, sampling, end == 40,
            following=following,
        )  # fmt: skip
        sampled = rank.runner.step([row])
        found += sampled.prompt_logprobs.get(0, ())
        assert (sampled.tokens[0] == -1) == (end < 40)
    assert [one.token for one in found] == prompt[1:]
    assert torch.tensor([one.logprob for one in found]).allclose(expected, atol=1e-3)
    assert all(len(one.top) == 2 for one in found)
    own = sampled.logprobs[0]
    assert (own.token, own.top[0][0]) == (sampled.tokens[0], int(logits[-1].argmax()))
