"""What requests want done to their logits is done, to their own row alone."""

import pytest
import torch

from engine_service.core.step_messages import Row, Sampling
from engine_service.device.logits import logprobs
from engine_service.device.sampler import sample

LOGITS = torch.tensor([[1.0, 4.0, 3.0, -2.0, 2.0]])


def row(index: int = 0, sampling=None, **fields) -> Row:
    """Returns a row that samples."""
    return Row((0,), 0, (0,), index, Sampling(**(sampling or {})), **fields)


def mask(*tokens: int) -> bytes:
    """Returns a mask of eight tokens."""
    return bytes([sum(1 << token for token in tokens)])


@pytest.mark.parametrize(
    ("asked", "token"),
    [
        (row(), 1),
        (row(sampling={"logit_bias": {3: 7.0}}), 3),
        (row(sampling={"logit_bias": {1: -100.0}}), 2),
        (row(banned=(1, 2)), 4),
        (row(allowed=mask(0, 3)), 0),
        (row(allowed=mask(1, 4), banned=(1,)), 4),
        (row(allowed=mask(1), banned=(1,)), 1),
        (row(sampling={"presence_penalty": 1.5}, output=(1,)), 2),
        (row(sampling={"presence_penalty": 1.5}, prompt=(1,)), 1),
        (row(sampling={"frequency_penalty": 0.6}, output=(1, 1)), 2),
        (row(sampling={"frequency_penalty": 0.6}, output=(1,)), 1),
        (row(sampling={"presence_penalty": -2.0}, output=(2,)), 2),
        (row(sampling={"repetition_penalty": 2.0}, prompt=(1,)), 2),
        (row(sampling={"repetition_penalty": 2.0}, output=(1, 2)), 1),
        (row(sampling={"repetition_penalty": 1e-3}, prompt=(3, 4)), 4),
    ],
)
def test_greedy_choices(asked, token):
    """Biases, masks and penalties decide between the likeliest tokens, as they are defined."""
    assert sample(LOGITS, [asked]) == [token]


def test_negative_logits_are_multiplied():
    """A repetition penalty makes tokens with negative logits less likely too."""
    logits = torch.tensor([[-1.0, -1.5]])
    assert sample(logits, [row(sampling={"repetition_penalty": 2.0}, prompt=(0,))]) == [1]


def test_others_are_left_alone():
    """A row's wishes change neither another row nor what the model said."""
    logits = LOGITS.repeat(3, 1)
    rows = [row(), row(banned=(1,)), row(sampling={"logit_bias": {0: 50.0}})]
    assert sample(logits, rows) == [1, 2, 0]
    assert logits.equal(LOGITS.repeat(3, 1))


def test_draws_keep_to_the_mask():
    """However hot, nothing comes that may not."""
    hot = {"temperature": 50.0, "seed": 3}
    drawn = {
        token
        for index in range(60)
        for token in sample(LOGITS, [row(index, hot, allowed=mask(0, 3, 4), banned=(4,))])
    }
    assert drawn == {0, 3}


def test_log_probabilities():
    """They are of the model's own logits, and sum to one."""
    expected = torch.log_softmax(LOGITS[0], 0)
    found = logprobs(LOGITS[0], 3, 2)
    assert (found.token, [token for token, _ in found.top]) == (3, [1, 2])
    assert found.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert found.top[0][1] == pytest.approx(float(expected[1]), abs=1e-6)
    everything = logprobs(LOGITS[0], 0, 99).top
    assert sum(torch.tensor([p for _, p in everything]).exp()) == pytest.approx(1)
