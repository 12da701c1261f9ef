"""Draws stay within what was allowed and depend on their own row alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.step_messages import Row, Sampling
from engine_service.device import sampler
from engine_service.device.sampler import uniform
from engine_service.errors import NonFiniteLogits

VOCAB = 50
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, VOCAB * 2]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
)


def _logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits: torch.Tensor, samplings: list[Sampling], indices: list[int]) -> list[int]:
    """Samples rows that want nothing else."""
    pairs = zip(samplings, indices, strict=True)
    return sampler.sample(logits, [Row((0,), 0, (0,), i, s) for s, i in pairs])


def _allowed(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """The definition, written out: top-k, then top-p of what is left, and min-p."""
    weights = ((logits.double() - logits.max()) / sampling.temperature).exp()
    order = sorted(range(len(weights)), key=lambda token: -float(weights[token]))
    order = order[: sampling.top_k] if sampling.top_k else order
    mass, before, kept = sum(float(weights[t]) for t in order), 0.0, set()
    for token in order:
        if before >= sampling.top_p * mass + 1e-12 or float(weights[token]) < sampling.min_p:
            break
        kept.add(token)
        before += float(weights[token])
    return kept


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), samplings, st.integers(0, 1000))
def test_a_draw_never_leaves_the_allowed_set(seed, sampling, index):
    """Whatever the settings, the token is one that all of them allow."""
    logits = _logits(seed)
    (token,) = sample(logits, [sampling], [index])
    if sampling.temperature == 0:
        assert token == int(logits.argmax())
    else:
        assert token in _allowed(logits[0], sampling)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.lists(samplings, min_size=1, max_size=6), st.integers(0, 50))
def test_a_draw_does_not_depend_on_its_batch(seed, chosen, index):
    """Alone or among others, a row draws the same token."""
    logits = _logits(seed, len(chosen))
    together = sample(logits, chosen, [index] * len(chosen))
    alone = [sample(logits[i : i + 1], [s], [index])[0] for i, s in enumerate(chosen)]
    assert together == alone


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=0.8, seed=5, top_k=2000),
        Sampling(temperature=50.0, seed=5, top_p=0.99),
        Sampling(temperature=50.0, seed=5, min_p=0.9),
        Sampling(temperature=0.8, seed=5, top_k=3, top_p=0.5),
    ],
)
def test_large_vocabularies_obey_the_same_definition(sampling):
    """The shortlist for large vocabularies changes nothing."""
    logits = _logits(3, vocab=5000)
    allowed = _allowed(logits[0], sampling)
    drawn = {sample(logits, [sampling], [index])[0] for index in range(60)}
    assert drawn <= allowed
    assert len(drawn) > 1 or len(allowed) == 1


def test_frequencies_follow_the_distribution():
    """Over many indices, tokens come as often as their probability says."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    drawn = [sample(logits, [Sampling(temperature=1.0, seed=9)], [i])[0] for i in range(3000)]
    found = torch.bincount(torch.tensor(drawn), minlength=3) / 3000
    assert torch.allclose(found, logits.softmax(1)[0].float(), atol=0.03)


def test_seeds_and_indices_decide_the_draw():
    """The same pair repeats, another seed or index does not."""
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, index) for seed in range(20) for index in range(20)}) == 400


@pytest.mark.parametrize("vocab", [1, 199, 256, 768, 32003, 49152])
def test_the_greedy_token_is_the_likeliest(vocab):
    """At every place of a vocabulary of any size, whatever is searched in parts."""
    logits = _logits(3, 64, vocab)
    places = torch.linspace(0, vocab - 1, 64).long()
    logits[torch.arange(64), places] = logits.max() + 1
    assert sample(logits, [Sampling()] * 64, [0] * 64) == places.tolist()


@pytest.mark.parametrize("vocab", [VOCAB, 512])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error(value, vocab):
    """No token is made of NaN or infinity, greedy or not; the row is named."""
    logits = _logits(1, 3, vocab)
    logits[1, 7] = value
    with pytest.raises(NonFiniteLogits) as caught:
        sample(logits, [Sampling()] * 3, [0] * 3)
    assert caught.value.details["rows"] == "1"
