"""A model in any format: loaded, captured, filled by bytes alone, and cut into ranks."""

from contextlib import nullcontext

import msgspec
import pytest
import torch
from format_cases import CASES, ERRORS, QUANTISED, error, packs, rounds
from safetensors.torch import load_file
from tiny_llama import Sequence, rank_layer, run, start_message, write_checkpoint
from transformers import AutoTokenizer

from engine_service.checkpoint import smollm2
from engine_service.core.step_messages import Row, Sampling
from engine_service.device import probe
from engine_service.device.batch import make_batch
from engine_service.device.capture import prove
from engine_service.device.loading import load
from engine_service.device.models import llama_format
from engine_service.device.rank import Rank
from engine_service.device.sharding import Shard
from engine_service.device.tolerance import relative_difference
from engine_service.errors import ArenaError, CaptureError, ProbeMismatch

MLP = ("gate", "up", "down")
PROMPT = tuple(range(1, 33))
LOGIT_ERRORS = {
    "plain": 0.0,
    "packed": 2**-6,
    "int8": 0.1,
    "fp8": 0.2,
    "fp8-ue8m0": 0.2,
    "int4": 0.6,
}
"""Largest difference of a logit, as a part of the largest; layers of random numbers magnify it."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def _rank(folder, name, dtype, **changes):
    served = str(dtype).removeprefix("torch.")
    return Rank(start_message(folder, served, weight_format=name, **changes))


def _loaded(folder, name, dtype):
    rank = _rank(folder, name, dtype)
    rank.load(folder, lambda _done, _total: None)
    return rank


def _logits(rank):
    with torch.inference_mode():
        return rank.runner.prefill(Row(PROMPT, 0, tuple(range(8)), 0, Sampling()))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_model_computes_nearly_what_a_plain_one_does(untied, tied, name, dtype):
    """Prompt and replayed answer, whether the head is the embedding or not."""
    for folder in (tied, untied):
        plain, rank = _loaded(folder, "plain", dtype), _loaded(folder, name, dtype)
        assert relative_difference(_logits(plain), _logits(rank)) <= LOGIT_ERRORS[name]
        rank.capture()
        rank.check_probe(rank.record_probe().probe)
        assert (rank.facts == plain.facts) == (name == "plain")


ROUNDED = [("plain", True), ("fp8", True), pytest.param("int8", False, marks=rounds)]


@pytest.mark.parametrize(("name", "refused"), ROUNDED)
@torch.inference_mode()
def test_a_graph_may_be_off_by_what_rounding_the_input_can_do(tied, name, refused):
    """A compiled layer computes a last bit otherwise, which int8 may round the other way."""
    rank = _loaded(tied, name, torch.float32)
    rank.capture()
    layer, (_, inputs) = rank.graphs.layer, rank.graphs.layer_example()
    with pytest.raises(CaptureError) if refused else nullcontext():
        prove(rank.model.layers[0], lambda *given: 1.01 * layer(*given), [inputs])


@pytest.mark.parametrize(("name", "refused"), ROUNDED)
def test_the_probe_allows_what_rounding_the_input_can_do(tied, name, refused):
    """One percent in float32 is other weights, unless input was rounded to whole numbers."""
    rank = _loaded(tied, name, torch.float32)
    rank.capture()
    recorded = msgspec.msgpack.decode(rank.record_probe().probe, type=probe.Probe)
    steps = [
        probe.ProbeStep(step.tokens, tuple(1.01 * logit for logit in step.logits))
        for step in recorded.steps
    ]
    other = msgspec.msgpack.encode(probe.Probe(recorded.prompt, tuple(steps)))
    with pytest.raises(ProbeMismatch) if refused else nullcontext():
        rank.check_probe(other)


FAMILIES = {
    "biases": {"architectures": ["Qwen2ForCausalLM"]},
    "experts": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "dtype"), [one for one in QUANTISED if "f32" in one.id])
def test_every_matrix_of_a_family_has_the_format(tmp_path, name, dtype, family):
    """Those of experts too; what is added to rows, or chooses among them, stays exact."""
    folder = write_checkpoint(tmp_path, **FAMILIES[family])
    plain, rank = _loaded(folder, "plain", dtype), _loaded(folder, name, dtype)
    rank.capture()
    rank.check_probe(rank.record_probe().probe)
    matrices = {one.names[0] for one in rank.model.matrices()} - {"head"}
    assert len(matrices) == (3 * (2 + 2) if family == "biases" else 3 * (2 + 4 * 2))
    for tensor, exact in plain.arena.tensors.items():
        held = rank.arena.tensors[tensor]
        assert held.dtype != dtype if tensor in matrices else torch.equal(held, exact)


@packs
def test_a_packed_model_is_a_plain_one_to_the_probe(untied, tied):
    """Packing rounds nothing."""
    for folder in (tied, untied):
        plain = _loaded(folder, "plain", torch.bfloat16)
        rank = _loaded(folder, "packed", torch.bfloat16)
        plain.capture()
        rank.capture()
        rank.check_probe(plain.record_probe().probe)


@pytest.mark.parametrize(("name", "dtype"), QUANTISED)
def test_embedding_and_head_stay_in_the_type_of_the_model(untied, tied, name, dtype):
    """A plain tied head is the embedding itself; a packed one says so in the facts."""
    for folder in (tied, untied):
        rank, exact = _loaded(folder, name, dtype), _loaded(folder, "auto", dtype)
        for tensor in ("embed", "head"):
            assert torch.equal(rank.arena.tensors[tensor], exact.arena.tensors[tensor])
        assert dict(rank.facts)["head_format"] == dict(exact.facts)["weight_format"]
        assert set(exact.facts) - set(rank.facts) == {("weight_format", _format(exact))}


def _format(rank):
    return dict(rank.facts)["weight_format"]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_graph_follows_bytes_that_land(tied, name, dtype):
    """A dummy captured on zeros computes with the weights that are copied into its arena."""
    seed = _rank(tied, name, dtype)
    loaded = seed.load(tied, lambda _done, _total: None)
    seed.capture()
    target = _rank(tied, name, dtype)
    target.capture()
    pairs = zip(target.arena.tensors.values(), seed.arena.tensors.values(), strict=True)
    for mine, theirs in pairs:
        mine.copy_(theirs)
    assert target.arena.digested() == loaded.manifest
    target.arena.seal()
    mine, theirs = Sequence([3, 1, 4]), Sequence([3, 1, 4])
    run(target.step, [mine], 12)
    run(seed.step, [theirs], 12)
    assert mine.output == theirs.output


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_bytes_do_not_depend_on_who_loads(tied, name, dtype):
    """Two loads of one checkpoint have one digest, and one set of facts."""
    one, other = (_loaded(tied, name, dtype) for _ in range(2))
    assert one.arena.digested().digest == other.arena.digested().digest != ""
    assert one.facts == other.facts


@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.inference_mode()
def test_the_parts_of_two_ranks_make_the_whole_product(tmp_path, name, dtype):
    """Rows are joined, columns summed: each part is rounded for itself, and as well as a whole."""
    folder = write_checkpoint(tmp_path, vocab_size=200, intermediate_size=160)
    parts = [rank_layer(folder, name, dtype, Shard(rank, 2)) for rank in range(2)]
    weights = load_file(folder / "model.safetensors")
    gate, up, down = (weights[f"model.layers.0.mlp.{each}_proj.weight"] for each in MLP)
    hidden, ffn = torch.randn(40, 64).to(dtype), torch.randn(40, 160).to(dtype)
    halves = [layer.gate_up(hidden).chunk(2, 1) for layer in parts]
    joined = torch.cat([torch.cat(side, 1) for side in zip(*halves, strict=True)], 1)
    assert error(hidden, torch.cat((gate, up)), joined) <= ERRORS[name, dtype]
    summed = sum(layer.down(cut) for layer, cut in zip(parts, ffn.chunk(2, 1), strict=True))
    assert error(ffn, down, summed) <= ERRORS[name, dtype]


@packs
def test_a_checkpoint_of_another_type_is_packed_as_served(tmp_path):
    """float32 on disk, bfloat16 served: as if it had been converted first."""
    wide = write_checkpoint(tmp_path / "wide")
    narrow = write_checkpoint(tmp_path / "narrow", dtype=torch.bfloat16)
    one, other = (_loaded(folder, "packed", torch.bfloat16) for folder in (wide, narrow))
    assert one.arena.digested().digest == other.arena.digested().digest


@pytest.mark.parametrize(("name", "dtype"), QUANTISED)
def test_a_loader_that_knows_no_matrices_fills_none(tied, name, dtype):
    """It would cast a checkpoint into the bytes of a format."""
    served = str(dtype).removeprefix("torch.")
    rank = Rank(start_message(tied, served, weight_format=name))
    slices = llama_format.checkpoint_slices(rank.config)
    with pytest.raises(ArenaError, match=r"layer\.0\.qkv holds"):
        load(rank.arena, tied, slices, llama_format.computed_tensors(rank.config))
    assert not any(tensor.view(torch.uint8).any() for tensor in rank.arena.tensors.values())


REAL_ERRORS = {"packed": 0.03, "int8": 0.25, "fp8": 0.1, "fp8-ue8m0": 0.1, "int4": 0.45}
"""Largest difference of a real model's logits, root mean square, as a part of the logits."""
TEXT = "The sea is salty because rivers carry dissolved minerals from rocks on land to the ocean."


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"), [one for one in CASES if one.id.endswith("-bf16") and "plain" not in one.id]
)
def test_a_real_model_stays_near_itself(name, dtype):
    """SmolLM2 in a format, beside float32, over all positions of a sentence."""
    folder = smollm2.fetch("float32").path
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    expected = _every(_loaded(folder, "plain", torch.float32), tokens)
    found = _every(_loaded(folder, name, dtype), tokens)
    assert float((found - expected).norm() / expected.norm()) <= REAL_ERRORS[name]


def _every(rank, tokens):
    """Returns the logits of every position."""
    row = Row(tuple(tokens), 0, rank.cache.scratch[0], 0, Sampling())
    with torch.inference_mode():
        batch = make_batch([row], rank.cache, rank.config.vocab_size)
        return rank.model.head.forward(rank.model.hidden(batch, rank.cache))
