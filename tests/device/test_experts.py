"""Experts: units of their own, in slots that a map names, mixed the same way everywhere."""

import pytest
import torch
from oracles import make
from tiny_llama import Sequence, run, serving_rank

from engine_service.device import experts
from engine_service.device.audit import audit
from engine_service.errors import ArenaError, CaptureError
from relay_service.core.manifest import BLOCK_BYTES

PROMPT = [3, 1, 4, 1, 5]
EXPERTS, LAYERS = 8, 3


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A model of one dense layer and two with eight routed and two shared experts."""
    return make("dots1", tmp_path_factory.mktemp("dots1"))


@pytest.fixture(scope="module")
def folder(oracle):
    """Its checkpoint."""
    return oracle.folder


@pytest.fixture
def rank(folder):
    """A captured rank that a test may break."""
    return serving_rank(folder, capture=True)


def _tokens(rank, count=12):
    sequence = Sequence(PROMPT)
    run(rank.step, [sequence], count)
    return sequence.output


def _unit(rank, name):
    (unit,) = [unit for unit in rank.arena.manifest.units if unit.name == name]
    assert unit.nbytes <= BLOCK_BYTES
    return unit, rank.arena.view(unit.offset, unit.nbytes)


def test_every_expert_is_a_unit_of_its_own(rank):
    """Named by layer and logical expert, and made of that expert's matrices alone."""
    units = [unit.name for unit in rank.arena.manifest.units]
    sparse = [f"layer.{layer}.expert.{e}" for layer in (1, 2) for e in range(EXPERTS)]
    dense = [f"layer.{layer}.dense" for layer in range(LAYERS)]
    assert sorted(units) == sorted(["embed", *dense, *sparse, "head", "rotary"])
    unit, _ = _unit(rank, "layer.2.expert.5")
    stored = "model.layers.2.mlp.experts.5."
    assert [(t.name, t.logical) for t in unit.tensors] == [
        ("layer.2.expert.5.gate_up", f"{stored}gate_proj.weight+{stored}up_proj.weight"),
        ("layer.2.expert.5.down", f"{stored}down_proj.weight"),
    ]


def test_one_expert_is_fetched_by_itself(rank, folder):
    """Bytes of its unit, from another instance, bring back what was lost, and nothing else."""
    expected = _tokens(rank)
    target = serving_rank(folder, capture=True)
    lost = [f"layer.{layer}.expert.{e}" for layer in (1, 2) for e in range(EXPERTS)]
    for name in lost:
        _unit(target, name)[1][:] = bytes(_unit(target, name)[0].nbytes)
    assert _tokens(target) != expected
    for name in lost:
        assert target.arena.digested() != rank.arena.digested()
        _unit(target, name)[1][:] = _unit(rank, name)[1]
    assert target.arena.digested() == rank.arena.digested()
    assert _tokens(target) == expected


def test_an_expert_may_lie_in_any_slot(rank):
    """Exchanged bytes, and a map that says so, change no token: eager or replayed."""
    expected = _tokens(rank)
    layer, order = rank.model.layers[1], torch.arange(EXPERTS).roll(3)
    stored = [[t.clone() for matrix in slot for t in matrix.tensors] for slot in layer.experts]
    for expert, slot in enumerate(order.tolist()):
        held = [tensor for matrix in layer.experts[slot] for tensor in matrix.tensors]
        for tensor, value in zip(held, stored[expert], strict=True):
            tensor.copy_(value)
    assert _tokens(rank) != expected
    layer.placement.copy_(order.unsqueeze(1))
    assert _tokens(rank) == expected


@pytest.fixture
def mixing(rank):
    """Rows, their choice, and the experts of a layer."""
    layer = rank.model.layers[1]
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    chosen, weights = experts.choose(hidden @ layer.router.T, layer.correction, layer.moe)
    return layer, (hidden, chosen, weights)


def test_a_part_that_lies_elsewhere_is_left_out(mixing):
    """So the parts of ranks that hold some experts each add up to the whole."""
    layer, inputs = mixing
    whole = experts.mix(*inputs, layer.placement, layer.experts)
    total, holder = torch.zeros_like(whole), torch.arange(EXPERTS) % 3
    for number in range(3):
        mine = (holder == number).nonzero().flatten()
        placement = torch.full((EXPERTS, 1), -1)
        placement[mine, 0] = torch.arange(len(mine))
        part = experts.mix(*inputs, placement, [layer.experts[e] for e in mine.tolist()])
        assert not torch.equal(part, whole)
        total += part
    assert torch.allclose(total, whole, atol=1e-5)


def test_a_device_mixes_as_the_host_does(mixing, monkeypatch):
    """Without asking who chose whom, which a CUDA graph could not."""
    layer, inputs = mixing
    placement = layer.placement.clone()
    placement[3] = -1
    expected = experts.mix(*inputs, placement, layer.experts)
    monkeypatch.setattr(experts, "_on_host", experts._on_device)
    assert torch.allclose(experts.mix(*inputs, placement, layer.experts), expected, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read(mixing):
    """What they hold does not matter, NaN included."""
    layer, (hidden, chosen, weights) = mixing
    chosen = chosen % 4
    expected = experts.mix(hidden, chosen, weights, layer.placement, layer.experts)
    for gate_up, down in layer.experts[4:]:
        gate_up.tensors[0].fill_(torch.nan)
        down.tensors[0].fill_(torch.nan)
    found = experts.mix(hidden, chosen, weights, layer.placement, layer.experts)
    assert torch.equal(found, expected)


def test_a_map_that_is_not_registered_is_refused(rank):
    """It would keep saying where experts lay before they were moved."""
    rank.model.layers[2].placement = torch.arange(EXPERTS)
    with pytest.raises(ArenaError, match=r"layers\.2\.placement"):
        audit(rank.model, rank.arena, rank.cache)


def test_an_expert_outside_the_arena_is_named(rank):
    """However deep in a layer it hangs."""
    layer = rank.model.layers[2]
    gate_up, down = layer.experts[5]
    moved = gate_up.bound([tensor.clone() for tensor in gate_up.tensors])
    layer.experts = (*layer.experts[:5], (moved, down), *layer.experts[6:])
    with pytest.raises(ArenaError, match=r"layers\.2\.experts\[5\]\[0\]"):
        audit(rank.model, rank.arena, rank.cache)


def test_layers_of_one_kind_that_differ_are_refused(rank):
    """Dense and sparse may stand side by side, but each kind has one graph."""
    layer = rank.model.layers[2]
    layer.experts = layer.experts[:4]
    with pytest.raises(CaptureError, match="layer 2 is not built like layer 1"):
        rank.graphs.capture()


def test_the_router_stays_exact(oracle):
    """In half precision too: who is chosen hangs on small differences."""
    held = serving_rank(oracle.folder, "bfloat16").arena.tensors
    gate = oracle.model.model.layers[1].mlp.gate
    assert torch.equal(held["layer.1.router"], gate.weight)
    assert torch.equal(held["layer.1.correction"], gate.e_score_correction_bias)
    assert held["layer.1.expert.0.down"].dtype == torch.bfloat16
