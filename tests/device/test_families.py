"""Every family and every way to rotate computes what transformers computes, in float32."""

import json

import pytest
import torch
from oracles import CASES, make
from tiny_llama import Sequence, run, serving_rank, start_message

from engine_service.core.step_messages import Row, Sampling
from engine_service.device.batch import make_batch
from engine_service.device.models.families import FAMILIES
from engine_service.device.models.rope import KINDS
from engine_service.device.rank import Rank
from engine_service.errors import CheckpointError

PROMPTS = ([5], [1, 2, 3], [(7 * i) % 199 for i in range(40)], [9] * 17)
TOKENS = 24
LIMIT = 1e-4
"""Largest difference of logits allowed, as a part of the largest one."""
HALF_FACTOR = 1.5
"""Mean error allowed in half precision, beside that of transformers."""


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """Our rank, captured and so audited, and the model of transformers."""
    oracle = make(request.param, tmp_path_factory.mktemp("family"))
    return serving_rank(oracle.folder, capture=True), oracle


def _difference(expected, found) -> float:
    assert expected.shape == found.shape
    return float((expected - found).abs().max() / expected.abs().max())


def test_every_family_and_every_rotation_has_a_case():
    """Nothing is listed that is not held against the reference."""
    architectures = {f"{case.family}ForCausalLM" for case in CASES.values()}
    assert architectures | {"DeepseekForCausalLM"} == set(FAMILIES)
    kinds = {case.settings.get("rope_parameters", {}).get("rope_type") for case in CASES.values()}
    assert kinds - {None} == set(KINDS)


@torch.inference_mode()
def _all_logits(rank, row) -> torch.Tensor:
    batch = make_batch([row], rank.cache, rank.config.vocab_size)
    return rank.model.head.forward(rank.model.hidden(batch, rank.cache))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_of_a_prompt(pair, prompt):
    """After each of its tokens, computed at once."""
    rank, oracle = pair
    assert _difference(oracle.logits(prompt), _all_logits(rank, Sequence(prompt).row())) < LIMIT


def test_logits_of_a_prompt_in_chunks(pair):
    """However it is cut; a chunk of one token is decoded by the captured graph."""
    rank, oracle = pair
    prompt = PROMPTS[2]
    expected = oracle.logits(prompt)
    for start, end in ((0, 5), (5, 19), (19, 20), (20, 40)):
        row = Row(tuple(prompt[start:end]), start, tuple(range(8)), 0, Sampling())
        decoded = end - start == 1
        found = rank.runner.decode([row]) if decoded else _all_logits(rank, row)
        assert _difference(expected[start:end], found) < LIMIT


def test_greedy_tokens_of_a_mixed_batch(pair):
    """Prompts of many lengths, prefilled eagerly and decoded together by the graph."""
    rank, oracle = pair
    sequences = [Sequence(p, first_block=8 * i) for i, p in enumerate(PROMPTS)]
    run(rank.step, sequences, TOKENS)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output == oracle.greedy(prompt, TOKENS)


@torch.inference_mode()
def test_replay_equals_eager(pair):
    """For a batch of mixed lengths, logit for logit."""
    rank, _ = pair
    sequences = [Sequence(p, first_block=8 * i) for i, p in enumerate(PROMPTS)]
    run(rank.step, sequences, 2)
    batch = make_batch([s.row() for s in sequences], rank.cache, rank.config.vocab_size)
    eager, replayed = rank.model.forward(batch, rank.cache), rank.graphs.replay(batch)
    assert torch.equal(eager, replayed)


def test_a_dummy_serves_the_bytes_of_a_seed(pair):
    """Captured on zeros, then filled by a copy of the arena's bytes: the same tokens."""
    rank, oracle = pair
    target = Rank(start_message(oracle.folder))
    target.capture()
    assert target.facts == rank.facts
    for mine, theirs in zip(
        target.arena.tensors.values(), rank.arena.tensors.values(), strict=True
    ):
        mine.copy_(theirs)
    assert target.arena.digested() == rank.arena.digested()
    target.arena.seal()
    target.check_probe(rank.record_probe().probe)
    mine, theirs = Sequence(PROMPTS[1]), Sequence(PROMPTS[1])
    run(target.step, [mine], TOKENS)
    run(rank.step, [theirs], TOKENS)
    assert mine.output == theirs.output


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama, biased", {}),
        ("qwen3", {}),
        ("gemma", {}),
        # Every expert is chosen: which ones are not would hang on rounding.
        ("mixtral", {"num_experts_per_tok": 4}),
        ("qwen2-moe", {"num_experts_per_tok": 6}),
        ("dots1", {"num_experts_per_tok": 8, "topk_group": 4}),
    ],
)
def test_half_precision_rounds_like_the_reference(tmp_path, name, sizes):
    """In bfloat16, in whatever format serves fastest here: packed, where it can be."""
    oracle = make(name, tmp_path, **sizes)
    rank = Rank(start_message(oracle.folder, "bfloat16", weight_format="auto"))
    rank.load(oracle.folder, lambda _done, _total: None)
    rank.capture()
    prompt = PROMPTS[2]
    exact, ours = oracle.logits(prompt), _all_logits(rank, Sequence(prompt).row())
    oracle.model.to(torch.bfloat16)
    theirs = oracle.logits(prompt).float()
    assert (ours - exact).abs().mean() < HALF_FACTOR * (theirs - exact).abs().mean()
    rank.check_probe(rank.record_probe().probe)


def _without_last_layer(oracle):
    """Says in the configuration that there is one layer less, and computes so."""
    path = oracle.folder / "config.json"
    written = json.loads(path.read_text())
    layers = written["num_hidden_layers"] - 1
    path.write_text(json.dumps({**written, "num_hidden_layers": layers}))
    oracle.model.config.num_hidden_layers = layers


def test_a_layer_that_predicts_further_tokens_is_not_read(tmp_path):
    """Where the family's checkpoints hold one, behind the last layer of the decoder."""
    oracle = make("glm4-moe", tmp_path)
    _without_last_layer(oracle)
    rank = serving_rank(oracle.folder, capture=True)
    found = _all_logits(rank, Sequence(PROMPTS[1]).row())
    assert _difference(oracle.logits(PROMPTS[1]), found) < LIMIT
    _without_last_layer(oracle)
    with pytest.raises(CheckpointError, match=r"unknown tensors: model\.layers\.2\."):
        serving_rank(oracle.folder)


def test_a_layer_too_many_is_refused_elsewhere(tmp_path):
    """The configuration and the checkpoint are not of one model."""
    oracle = make("llama", tmp_path)
    _without_last_layer(oracle)
    with pytest.raises(CheckpointError, match=r"unknown tensors: model\.layers\.2\."):
        serving_rank(oracle.folder)
