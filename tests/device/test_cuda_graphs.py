"""Which graph a batch goes into, what is copied there, and what comes back."""

import pytest
import torch
from fake_device import rerun
from oracles import make
from tiny_llama import BLOCK_TOKENS, Sequence, run, serving_rank, start_message
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from engine_service.device import attention
from engine_service.device.batch import Batch, make_batch
from engine_service.device.cuda_graphs import ROWS, CudaGraphRunner
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.device.rank import Rank
from engine_service.errors import CaptureError
from relay_service.core.dtypes import DType


@pytest.fixture
def rank(tied):
    """A rank with weights, whose decode passes are captured one per size."""
    rank = serving_rank(tied)
    _with_graphs(rank).capture()
    return rank


def _with_graphs(rank, record=rerun):
    graphs = CudaGraphRunner(rank.model, rank.cache, record)
    rank.graphs = rank.runner._graphs = graphs
    return graphs


def _rows(count):
    """Rows with one token to decode each; their contexts share blocks, which only read."""
    return [Sequence([3 + i % 190], first_block=8 * (i % 8)).row() for i in range(count)]


@torch.inference_mode()
def _both(rank, rows):
    """Returns eager and replayed logits of a batch."""
    batch = make_batch(rows, rank.cache, rank.config.vocab_size)
    return rank.model.forward(batch, rank.cache), rank.graphs.replay(batch)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_replay_equals_eager_for_every_batch_size(rank, count):
    """A batch that fills its graph and one that leaves rows idle give the same logits."""
    eager, replayed = _both(rank, _rows(count))
    assert replayed.shape == eager.shape
    assert torch.allclose(eager, replayed, atol=1e-5)


def test_a_batch_beyond_the_largest_graph_is_replayed_in_parts(tied):
    """Whatever the scheduler puts together is decoded, in order."""
    rank = Rank(start_message(tied, kv_blocks=ROWS[-1] + 8))
    rank.load(tied, lambda _done, _total: None)
    _with_graphs(rank).capture()
    sequences = [Sequence([3 + i], first_block=i) for i in range(ROWS[-1] + 5)]
    eager, replayed = _both(rank, [sequence.row() for sequence in sequences])
    assert torch.allclose(eager, replayed, atol=1e-5)


def test_contexts_of_every_length_decode_alike(rank, captured):
    """Long and short contexts side by side, over the seams of blocks and of widths."""
    expected = [Sequence([1]), Sequence(range(30), first_block=8)]
    found = [Sequence([1]), Sequence(range(30), first_block=8)]
    run(captured.runner.step, expected, 30)
    run(rank.runner.step, found, 30)
    assert [s.output for s in found] == [s.output for s in expected]


def test_a_wider_context_takes_a_wider_graph(tied):
    """Several widths are captured, up to all positions of the model."""
    rank = serving_rank(tied)
    rank.cache = KVCache(rank.model.config, DType.F32, 64, 1)
    graphs = _with_graphs(rank)
    graphs.capture()
    widths = sorted({width for _, width in graphs.sizes})
    assert widths == [16, 64, 128]
    assert sorted({rows for rows, _ in graphs.sizes}) == list(ROWS)


def test_idle_rows_leave_everything_alone(rank):
    """What the rows of others hold, and the block that pads tables, stays as it was."""
    _both(rank, _rows(4))  # whose fourth row must not come back
    with torch.inference_mode():
        rank.cache.keys[:, :64] = 7
        rank.cache.values[:, :64] = 7
        before = rank.cache.keys.clone(), rank.cache.values.clone()
        _both(rank, _rows(3))
    mine = [8 * i for i in range(3)]
    others = [block for block in range(64) if block not in mine]
    assert torch.equal(rank.cache.keys[:, others], before[0][:, others])
    assert torch.equal(rank.cache.values[:, others], before[1][:, others])
    assert not rank.cache.keys[:, rank.cache.padding_block].any()
    assert not rank.cache.values[:, rank.cache.padding_block].any()


def test_what_a_larger_batch_left_does_not_come_back(rank):
    """The inputs of a graph hold nothing of the batch before."""
    first = _both(rank, _rows(1))[1]
    _both(rank, _rows(4))
    _both(rank, _rows(3))
    assert torch.equal(_both(rank, _rows(1))[1], first)


def test_logits_are_the_callers(rank):
    """A later replay does not write over logits that were returned."""
    first = _both(rank, _rows(2))[1]
    kept = first.clone()
    _both(rank, [Sequence([100]).row(), Sequence([101], first_block=8).row()])
    assert torch.equal(first, kept)


def test_new_weights_in_place_are_followed(rank):
    """Weights that land at the same addresses are what a replay computes with."""
    before = _both(rank, _rows(2))[1]
    with torch.no_grad():
        rank.model.layers[0].qkv.tensors[0].mul_(2)
    eager, after = _both(rank, _rows(2))
    assert torch.allclose(eager, after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def test_replay_before_capture_is_refused(tied):
    """There is nothing to replay yet."""
    rank = serving_rank(tied)
    assert not _with_graphs(rank).captured
    with pytest.raises(CaptureError, match="no graph"):
        _both(rank, _rows(1))


def test_a_capture_that_fails_leaves_none(tied):
    """An error of CUDA says which size could not be captured, and nothing can be replayed."""
    rank, done = serving_rank(tied), []

    def fails(forward):
        if len(done) == 3:
            raise RuntimeError("CUDA error: out of memory")
        done.append(1)
        return rerun(forward)

    graphs = _with_graphs(rank, fails)
    with pytest.raises(CaptureError, match=r"decoding 4 rows of 16 blocks.* out of memory"):
        graphs.capture()
    assert not graphs.captured


class _OneDevice(TorchDispatchMode):
    """Fails where an operator gets a tensor that lies elsewhere."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Checks and calls."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, f"{func} on {leaf.device}"
        return func(*args, **(kwargs or {}))


def _meta(*shape, dtype=torch.float32):
    """A tensor on a device that has no values: whoever asks the host for one fails."""
    return torch.empty(shape, dtype=dtype, device="meta")


def test_attention_on_a_device_never_asks_the_host():
    """No length, mask or index of a captured pass is computed from values that the host reads."""
    cache, index = _meta(5, BLOCK_TOKENS, 2, 8), _meta(3, dtype=torch.int64)
    query, key, tables = _meta(3, 4, 8), _meta(3, 2, 8), _meta(3, 4, dtype=torch.int64)
    with _OneDevice():
        for count in (1, 3):
            arguments = [query, key, key, cache, cache, index, tables, index]
            rows = [a[:count] if a is not cache else a for a in arguments]
            assert attention._attend_on_device(*rows).shape == (count, 4, 8)
        assert attention._prefill(query, _meta(7, 2, 8), _meta(7, 2, 8)).shape == query.shape
    with pytest.raises(RuntimeError):  # as the CPU's own way would, for one row
        attention._attend(*rows[:3], cache, cache, index[:1], tables[:1], index[:1])


@pytest.mark.parametrize("name", ["llama, biased", "gemma", "qwen2-moe", "dots1", "glm4-moe"])
def test_a_pass_on_a_device_makes_no_tensor_elsewhere(tmp_path, name):
    """With weights, cache and batch on a device, every operator of a pass stays there.

    Nor does the host ask which experts were chosen.
    """
    rank = serving_rank(make(name, tmp_path).folder)
    tensors = {name: tensor.to("meta") for name, tensor in rank.arena.tensors.items()}
    model = Llama(rank.model.config, tensors)
    cache = KVCache(model.config, DType.F32, 8, BLOCK_TOKENS, torch.device("meta"))
    with torch.inference_mode(), _OneDevice():
        for tokens, rows in ((5, 1), (1, 1), (3, 3)):
            index, lengths = (_meta(n, dtype=torch.int64) for n in (tokens, rows))
            batch = Batch(index, index, index, _meta(rows, 2, dtype=torch.int64), lengths)
            assert model.forward(batch, cache).shape == (rows, model.config.vocab_size)
