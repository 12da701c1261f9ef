"""Experts that nobody holds: rows pass over them, and a folder gives them back."""

import math
import os

import msgspec
import pytest
import torch
from format_cases import serves
from oracles import make
from rank_threads import Ranks

from engine_service.core.expert_map import ExpertMap
from engine_service.core.member_messages import ReadUnits
from engine_service.device.experts import choose
from engine_service.device.formats.layouts import LAYOUTS
from engine_service.device.models.routing import MoE
from engine_service.device.unit_reading import read_units
from engine_service.errors import CheckpointError
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import Manifest
from relay_service.errors import ManifestError
from relay_service.memory.host import HostArena, create_memfd

PROMPTS = ([3, 1, 4, 1, 5], [9, 8])
EXPERTS = 8
SIZES = {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a dense layer and two with eight experts each, and shared ones."""
    return make("dots1", tmp_path_factory.mktemp("dots1"), **SIZES).folder


# Routing


def _reference(logits, correction, moe, lost):
    """Chooses row by row, as if the lost experts had never been there."""
    chosen, weights = [], []
    for row in logits.tolist():
        if moe.scoring == "softmax":
            top = max(row)
            total = sum(math.exp(one - top) for one in row)
            scores = [math.exp(one - top) / total for one in row]
        else:
            scores = [1 / (1 + math.exp(-one)) for one in row]
        judged = [s + (correction[e].item() if correction is not None else 0.0)
                  for e, s in enumerate(scores)]  # fmt: skip
        left = [e for e in range(moe.experts) if e not in lost]
        if moe.groups > 1:
            size = moe.experts // moe.groups
            groups = [[e for e in left if e // size == g] for g in range(moe.groups)]
            worth = [
                sum(sorted((judged[e] for e in group), reverse=True)[: moe.group_best])
                if len(group) >= moe.group_best else -math.inf
                for group in groups
            ]  # fmt: skip
            best = sorted(range(moe.groups), key=lambda g: -worth[g])[: moe.top_groups]
            left = [e for g in best for e in groups[g]]
        picked = sorted(left, key=lambda e: -judged[e])[: moe.top_k]
        parts = [scores[e] for e in picked]
        if moe.normalized:
            parts = [one / sum(parts) for one in parts]
        chosen.append(picked)
        weights.append([one * moe.scale for one in parts])
    return chosen, weights


@pytest.mark.parametrize("lost", [(0,), (1, 6), (0, 1, 8, 9)])
@pytest.mark.parametrize(
    "moe",
    [
        MoE(experts=12, top_k=3, ffn_size=8),
        MoE(experts=12, top_k=3, ffn_size=8, normalized=True, scale=2.5),
        MoE(experts=12, top_k=3, ffn_size=8, scoring="sigmoid", normalized=True),
        MoE(experts=12, top_k=2, ffn_size=8, groups=3, top_groups=2, group_best=1),
        MoE(experts=12, top_k=4, ffn_size=8, scoring="sigmoid", normalized=True, corrected=True,
            groups=3, top_groups=2, group_best=2),
    ],
)  # fmt: skip
def test_rows_choose_among_the_others(moe, lost):
    """As a reference does that takes them out before it chooses, groups and weights included."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, moe.experts, generator=generator)
    correction = torch.randn(moe.experts, generator=generator) * 0.1 if moe.corrected else None
    mask = torch.zeros(moe.experts, dtype=torch.bool)
    mask[list(lost)] = True
    before = choose(logits, correction, moe)[0]
    assert (mask[before]).any()
    chosen, weights = choose(logits, correction, moe, mask)
    expected, parts = _reference(logits, correction, moe, lost)
    assert [sorted(row) for row in chosen.tolist()] == [sorted(row) for row in expected]
    order = torch.tensor(expected)
    by_expert = torch.zeros(len(logits), moe.experts).scatter(1, chosen, weights)
    assert torch.allclose(by_expert.gather(1, order), torch.tensor(parts), atol=1e-6)


def test_an_expert_that_has_to_be_chosen_weighs_nothing():
    """Where fewer are left than a row goes through, the others share the weight."""
    moe = MoE(experts=4, top_k=3, ffn_size=8, normalized=True)
    mask = torch.tensor([True, True, False, False])
    chosen, weights = choose(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), None, moe, mask)
    held = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    assert sum(held.get(e, 0.0) for e in (2, 3)) == pytest.approx(1.0)
    assert all(held.get(e, 0.0) == 0.0 for e in (0, 1))


def test_a_degraded_instance_computes_without_them(folder):
    """The tokens of a model whose router was never told of them; whole again, those of before."""
    with Ranks(folder, 1, 2) as ranks, Ranks(folder) as reference:
        whole, expected = ranks.map, reference.tokens(PROMPTS)
        kept = ranks.ranks[0]
        ranks.lose(0)
        assert ranks.rejoin("one") == [None]
        ranks.place(whole.without([0]), routes=True)
        assert "experts.lost" in ranks.ranks[0].model.state
        (other,) = reference.ranks
        other.model.pass_over({1: (0, 1, 2, 3), 2: (0, 1, 2, 3)})
        other.capture()
        found = reference.tokens(PROMPTS)
        assert found != expected
        assert ranks.tokens(PROMPTS) == found
        other.model.pass_over({})
        other.capture()
        assert reference.tokens(PROMPTS) == expected
        assert "experts.lost" not in other.model.state
        assert kept not in ranks.ranks


# Reading


def _parcel(ranks, names, part=0):
    """A memory file for some experts, laid out as a rank that holds them all would hold them."""
    held = {u.name: u for u in ranks.ranks[part].arena.manifest.units}
    specs = [
        UnitSpec(name, tuple(
            TensorSpec(t.name, t.dtype, t.shape, t.kind, t.logical, t.alias, t.strides, t.cut)
            for t in held[name].tensors))
        for name in names
    ]  # fmt: skip
    manifest = lay_out(0, specs)
    fd = create_memfd("tests", manifest.data_bytes)
    memory = HostArena(fd, manifest.data_bytes, writable=True)
    memory.write_header("tests")
    return manifest, fd, memory


NAMES = ["layer.2.expert.5", "layer.1.expert.0", "layer.1.expert.6"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("held", LAYOUTS)
def test_a_folder_gives_experts_as_a_load_would(folder, held, tp, monkeypatch):
    """Byte for byte in every format, for each part; nothing else of the folder is read."""
    dtype = next((d for d in ("float32", "bfloat16")
                  if serves(held, getattr(torch, d))), None)  # fmt: skip
    if dtype is None:
        pytest.skip("not on this processor")
    read, preadv = [], os.preadv
    with Ranks(folder, tp, weight_format=held, dtype=dtype) as ranks:
        for part, rank in enumerate(ranks.ranks):
            manifest, fd, memory = _parcel(ranks, NAMES, part)
            read.clear()
            with monkeypatch.context() as patched:

                def counted(fd, into, offset):
                    read.append(sum(map(len, into)))
                    return preadv(fd, into, offset)

                patched.setattr(os, "preadv", counted)
                found = read_units(rank, fd, ReadUnits(str(folder), manifest), lambda *_: None)
            expected = {u.name: u for u in ranks.units(rank)}
            for unit in found.manifest.units:
                there = expected[unit.name]
                assert unit.digests == there.digests
                assert bytes(memory.view(unit.offset, unit.nbytes)) == bytes(
                    rank.arena.view(there.offset, there.nbytes)
                )
            matrices = 3 * 128 * 256 * 4 * len(NAMES)  # of float32 in the folder
            assert 0 < sum(read) <= matrices
            if held == "plain":
                assert sum(read) == matrices // tp
            memory.close()
            os.close(fd)


def _refused(rank, command, fd, error, words):
    before = rank.arena.digested()
    with pytest.raises(error, match=words):
        read_units(rank, fd, command, lambda *_: None)
    assert rank.arena.digested() == before


def test_what_cannot_be_read_is_refused(folder, tmp_path):
    """No folder, experts that are none, other shapes, memory too small: nothing is written."""
    with Ranks(folder) as ranks:
        (rank,) = ranks.ranks
        manifest, fd, memory = _parcel(ranks, NAMES)
        _refused(rank, ReadUnits(str(tmp_path), manifest), fd, CheckpointError, str(tmp_path))
        make("dots1", tmp_path, **SIZES | {"moe_intermediate_size": 128})
        _refused(rank, ReadUnits(str(tmp_path), manifest), fd, CheckpointError, "another shape")
        fewer = make("dots1", tmp_path / "fewer", **SIZES | {"n_routed_experts": 6}).folder
        _refused(rank, ReadUnits(str(fewer), manifest), fd, CheckpointError, "missing tensors")
        for name in ("layer.1.dense", "layer.0.expert.1", "layer.1.expert.8", "layer.9.expert.1"):
            unit = msgspec.structs.replace(manifest.units[0], name=name)
            other = Manifest(0, manifest.data_bytes, (unit,))
            _refused(rank, ReadUnits(str(folder), other), fd, ManifestError, name)
        unit = msgspec.structs.replace(manifest.units[0], name=NAMES[1])
        other = Manifest(0, manifest.data_bytes, (unit,))
        _refused(rank, ReadUnits(str(folder), other), fd, ManifestError, "otherwise")
        small = create_memfd("tests", 4096)
        _refused(rank, ReadUnits(str(folder), manifest), small, ManifestError, "manifest needs")
        assert not any(memory.view(0, manifest.data_bytes))
        memory.close()
        os.close(small)
        os.close(fd)


def test_maps_know_what_is_lost():
    """By layer; a map that holds everything names nothing."""
    whole = ExpertMap.linear(4, [1, 3], 2)
    assert whole.lost == {}
    assert whole.without([0]) == ExpertMap(4, {1: ((2, 3),), 3: ((2, 3),)})
    assert whole.without([0]).lost == {1: (0, 1), 3: (0, 1)}
    assert whole.without([]) == whole
