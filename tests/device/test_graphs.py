"""Captured graphs follow the arena, and nothing else."""

import os
import subprocess
import sys

import pytest
import torch
from tiny_llama import Sequence, run, serving_rank, start_message, write_checkpoint

from engine_service.core.step_messages import Sampled
from engine_service.device.batch import make_batch
from engine_service.device.models.llama import Layer
from engine_service.device.rank import Rank
from engine_service.errors import CaptureError


@pytest.fixture
def rank(tied):
    """A rank of its own with a captured graph."""
    return serving_rank(tied, capture=True)


@torch.inference_mode()
def _both(rank, count=1):
    """Returns eager and replayed logits of a batch of one-token rows."""
    rows = [Sequence([3 + i], first_block=8 * i).row() for i in range(count)]
    batch = make_batch(rows, rank.cache, rank.config.vocab_size)
    return rank.model.forward(batch, rank.cache), rank.graphs.replay(batch)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8])
def test_replay_equals_eager_for_every_batch_size(captured, count):
    """One capture serves every batch size."""
    eager, replayed = _both(captured, count)
    assert eager.isfinite().all()
    assert torch.allclose(eager, replayed, atol=1e-5)


def test_replay_equals_eager_for_every_context(captured):
    """One capture serves every context length and mixture of lengths."""
    sequences = [Sequence([1]), Sequence(range(30), first_block=8)]
    run(captured.runner.step, sequences, 30)
    eager = [Sequence([1]), Sequence(range(30), first_block=8)]

    @torch.inference_mode()
    def step(rows):
        logits = [captured.runner.prefill(row) for row in rows]
        return Sampled(tuple(int(row.argmax()) for row in logits))

    run(step, eager, 30)
    assert [s.output for s in sequences] == [s.output for s in eager]


def test_decode_never_calls_the_layers_again(rank, monkeypatch):
    """After capture the Python of a layer is not part of decode."""
    expected, sequence = Sequence([3]), Sequence([3])
    run(rank.runner.step, [expected], 5)

    def refuse(*_):
        pytest.fail("the layer was called")

    monkeypatch.setattr(Layer, "forward", refuse)
    run(rank.runner.step, [sequence], 5)
    assert sequence.output == expected.output


def test_rebinding_a_weight_does_not_reach_the_graph(rank):
    """A new tensor in a weight's place changes eager and leaves replay on the arena."""
    before, _ = _both(rank)
    layer = rank.model.layers[0]
    layer.qkv = layer.qkv.bound([layer.qkv.tensors[0] * 2])
    eager, replayed = _both(rank)
    assert not torch.allclose(eager, replayed, atol=1e-3)
    assert torch.allclose(replayed, before, atol=1e-5)


def test_copying_in_place_reaches_eager_and_graph_alike(rank):
    """New values at the same address are what both compute with."""
    before, _ = _both(rank)
    with torch.no_grad():
        (weight,) = rank.model.layers[0].qkv.tensors
        weight.copy_(weight * 2)
    eager, replayed = _both(rank)
    assert torch.allclose(eager, replayed, atol=1e-5)
    assert not torch.allclose(eager, before, atol=1e-3)


def test_ten_updates_leave_addresses_and_equality(rank):
    """Alternating weights with allocator churn between never move or detach anything."""
    original = {name: tensor.clone() for name, tensor in rank.arena.tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in rank.arena.tensors.items()}
    seen = []
    for turn in range(10):
        churn = [torch.empty(size) for size in range(1000, 200000, 7001)]
        for name, tensor in rank.arena.tensors.items():
            if "rotary" not in name and name != "head":
                tensor.copy_(original[name] * (1 + turn % 2))
        churn.clear()
        eager, replayed = _both(rank, 4)
        assert torch.allclose(eager, replayed, atol=1e-5)
        seen.append(replayed)
    assert all(torch.equal(seen[turn], seen[turn % 2]) for turn in range(10))
    assert addresses == {name: tensor.data_ptr() for name, tensor in rank.arena.tensors.items()}


def test_a_graph_that_would_hold_a_tensor_is_refused(tied, monkeypatch):
    """A derived tensor that the layer closes over is named."""
    rank = serving_rank(tied)
    forward = Layer.forward
    for layer in rank.model.layers:
        layer.merged = {"norm": layer.input_norm.clone()}

    def with_merged(self, hidden, *rest):
        return forward(self, hidden * self.merged["norm"], *rest)

    monkeypatch.setattr(Layer, "forward", with_merged)
    with pytest.raises(CaptureError, match=r"layers\.0\.merged\['norm'\]"):
        rank.graphs.capture()
    assert not rank.graphs.captured


def test_a_branch_on_a_size_is_refused(tied, monkeypatch):
    """A layer that does something else for a larger batch has no one graph."""
    rank, forward = serving_rank(tied), Layer.forward

    def branching(self, hidden, *rest):
        return forward(self, hidden * 2 if hidden.shape[0] > 1 else hidden, *rest)

    monkeypatch.setattr(Layer, "forward", branching)
    with pytest.raises(CaptureError, match="layer cannot be captured"):
        rank.graphs.capture()
    assert not rank.graphs.captured


def test_capturing_needs_no_compiler(tied):
    """A rank that captures and serves imports no compiler: that alone would take seconds."""
    script = (
        "import sys; from tiny_llama import Sequence, run, serving_rank; from pathlib import Path;"
        "rank = serving_rank(Path(sys.argv[1]), capture=True);"
        "run(rank.runner.step, [Sequence([3])], 2);"
        "print({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tied)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"


def test_layers_that_differ_are_refused(tied):
    """One traced layer cannot stand for another shape."""
    rank = serving_rank(tied)
    down = rank.model.layers[1].down
    rank.model.layers[1].down = down.bound([down.tensors[0].double()])
    with pytest.raises(CaptureError, match="layer 1"):
        rank.graphs.capture()


def test_replay_before_capture_is_refused(tied):
    """There is nothing to replay yet."""
    with pytest.raises(CaptureError, match="captured"):
        _both(serving_rank(tied))


def test_sizes_that_coincide_stay_apart(tmp_path):
    """A model whose sizes are small and equal is captured for any batch all the same."""
    folder = write_checkpoint(
        tmp_path, hidden_size=8, num_attention_heads=4, num_key_value_heads=4, head_dim=2,
        intermediate_size=8, vocab_size=8, num_hidden_layers=5,
    )  # fmt: skip
    rank = serving_rank(folder, capture=True)
    for count in range(1, 9):
        rows = [Sequence([i % 8], first_block=8 * i).row() for i in range(count)]
        with torch.inference_mode():
            batch = make_batch(rows, rank.cache, 8)
            eager, replayed = rank.model.forward(batch, rank.cache), rank.graphs.replay(batch)
        assert torch.allclose(eager, replayed, atol=1e-5)


def test_capturing_while_weights_land_is_possible(tied):
    """Values that change, or are NaN, while a graph is captured make no difference."""
    rank = serving_rank(tied)
    rank.graphs.capture()
    expected = Sequence([3])
    run(rank.runner.step, [expected], 5)
    landing = Rank(start_message(tied))
    for tensor in landing.arena.tensors.values():
        tensor.fill_(float("nan"))
    landing.graphs.capture()
    for name, tensor in landing.arena.tensors.items():
        tensor.copy_(rank.arena.tensors[name])
    sequence = Sequence([3])
    run(landing.runner.step, [sequence], 5)
    assert sequence.output == expected.output


def test_a_graph_that_computes_something_else_is_refused(tied, monkeypatch):
    """A layer whose Python depends on what tracing cannot see is not captured."""
    rank, forward, calls = serving_rank(tied), Layer.forward, []

    def unsteady(self, hidden, *rest):
        calls.append(1)
        return forward(self, hidden, *rest) * len(calls)

    monkeypatch.setattr(Layer, "forward", unsteady)
    with pytest.raises(CaptureError, match="does not compute what eager does"):
        rank.graphs.capture()
    assert not rank.graphs.captured
