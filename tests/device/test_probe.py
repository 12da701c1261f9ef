"""The probe passes on equal weights and tells others apart."""

import msgspec
import pytest
import torch
from tiny_llama import Sequence, run, serving_rank, start_message, write_checkpoint

from engine_service.device.probe import Probe
from engine_service.device.rank import Rank
from engine_service.errors import CaptureError, NonFiniteLogits, ProbeMismatch


@pytest.fixture(scope="module")
def recorded(captured) -> bytes:
    """What the seed recorded."""
    return captured.record_probe().probe


def _changed(probe: bytes, **changes) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(probe, type=Probe), **changes)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equal_weights_pass(tied, dtype):
    """The same weights compute the same, eagerly and from the graph, in each type."""
    rank = serving_rank(tied, dtype, capture=True)
    rank.check_probe(rank.record_probe().probe)


def test_decode_without_a_graph_is_an_error(tied):
    """Nothing decodes eagerly behind anybody's back when no graph was captured."""
    with pytest.raises(CaptureError):
        serving_rank(tied).step((Sequence([1]).row(),))


def test_a_probe_says_what_was_computed(recorded):
    """Sixteen prompt tokens, eight steps, sixteen candidates each, best first."""
    probe = msgspec.msgpack.decode(recorded, type=Probe)
    assert len(probe.prompt) == 16
    assert [len(step.tokens) for step in probe.steps] == [16] * 8
    assert all(list(step.logits) == sorted(step.logits, reverse=True) for step in probe.steps)


def test_the_recorded_tokens_are_the_greedy_ones(captured, recorded):
    """The probe's tokens are what a request would have got."""
    probe = msgspec.msgpack.decode(recorded, type=Probe)
    sequence = Sequence(probe.prompt)
    run(captured.runner.step, [sequence], 8)
    assert sequence.output == [step.tokens[0] for step in probe.steps]


def test_other_weights_are_told_apart(tmp_path, recorded):
    """A model of the same shape with other weights fails at the first step."""
    rank = serving_rank(write_checkpoint(tmp_path, seed=2))
    with pytest.raises(ProbeMismatch, match="step 0, eager"):
        rank.check_probe(recorded)


def test_one_wrong_tensor_is_told_apart(tied, recorded):
    """Rotary tables that never arrived are enough."""
    rank = serving_rank(tied)
    rank.model.embedding.cos.zero_()
    with pytest.raises(ProbeMismatch):
        rank.check_probe(recorded)


def test_a_graph_on_other_tensors_is_told_apart(tied, recorded):
    """Eager passes and the replay does not: the graph is what serves."""
    rank = serving_rank(tied, capture=True)
    layer = rank.model.layers[0]
    own = layer.gate_up.bound([layer.gate_up.tensors[0].clone()])
    layer.gate_up.tensors[0].zero_()
    layer.gate_up = own
    with pytest.raises(ProbeMismatch, match="replayed"):
        rank.check_probe(recorded)


@pytest.mark.parametrize("wrong", [2, 3])
def test_so_many_steps(captured, recorded, wrong):
    """Those that are asked for are compared, and no other."""
    steps = list(msgspec.msgpack.decode(recorded, type=Probe).steps)
    logits = tuple(one + 100 for one in steps[wrong].logits)
    steps[wrong] = msgspec.structs.replace(steps[wrong], logits=logits)
    other = _changed(recorded, steps=tuple(steps))
    captured.check_probe(other, wrong)
    with pytest.raises(ProbeMismatch, match=f"step {wrong}, replayed"):
        captured.check_probe(other, wrong + 1)


def test_dummy_weights_are_told_apart(tied, recorded):
    """An arena of zeros computes zeros."""
    with pytest.raises(ProbeMismatch):
        Rank(start_message(tied)).check_probe(recorded)


def test_a_probe_disturbs_no_request(captured, recorded):
    """A probe between two steps leaves a running request's KV alone."""
    undisturbed, sequence = Sequence([4, 5, 6]), Sequence([4, 5, 6])
    run(captured.runner.step, [undisturbed], 10)
    for _ in range(5):
        run(captured.runner.step, [sequence], 2)
        captured.check_probe(recorded)
    assert sequence.output == undisturbed.output


@pytest.mark.parametrize(
    "broken",
    [
        lambda _: b"",
        lambda probe: probe[:-1],
        lambda probe: _changed(probe, steps=()),
        lambda probe: _changed(probe, prompt=(1 << 40,) * 16),
        lambda probe: _changed(probe, prompt=(1,) * 500),
    ],
)
def test_a_probe_that_cannot_be_run_is_refused(captured, recorded, broken):
    """What came over a socket is checked before it is used."""
    with pytest.raises(ProbeMismatch):
        captured.check_probe(broken(recorded))


def test_weights_that_compute_nan_record_nothing(tied):
    """No probe, and no token, is made of NaN."""
    rank = serving_rank(tied, capture=True)
    rank.model.layers[1].down.tensors[0].fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        rank.record_probe()
    with pytest.raises(NonFiniteLogits):
        rank.step((Sequence([1]).row(),))
    assert torch.is_inference_mode_enabled() is False
