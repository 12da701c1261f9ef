"""Experts over groups of ranks: the tokens of one rank, wherever experts lie and move to."""

import msgspec
import pytest
import torch
from oracles import make
from rank_threads import Ranks, alone
from tiny_llama import Sequence, start_message

from engine_service.core.expert_messages import DropExperts
from engine_service.device import expert_moves
from engine_service.device.experts import mix
from engine_service.device.intake import LoadOptions
from engine_service.device.loading import load
from engine_service.device.models import llama_format
from engine_service.device.plan import plan
from engine_service.errors import (
    ArenaError,
    ConfigError,
    ResourceExhausted,
    UnsupportedModel,
    WrongState,
)

PROMPTS = ([3, 1, 4, 1, 5], [(7 * i) % 199 for i in range(20)], [9, 8])
LAYER, EXPERTS = 1, 8
MODELS = {"mixtral": 4, "qwen2-moe": 6, "deepseek": 8, "dots1": 8}
SPLITS = [(1, 2), (2, 1), (2, 2), (1, 4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models with experts, and the tokens that one rank makes of them."""
    made = {}

    def folder(name):
        if name not in made:
            path = make(name, tmp_path_factory.mktemp(name), num_key_value_heads=4).folder
            made[name] = path, alone(path, PROMPTS)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def dots(folders):
    """A model of one dense layer and two of eight experts each, with shared ones."""
    return folders("dots1")


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        pytest.param(name, *split, marks=() if (row + column) % 3 == 0 else pytest.mark.full)
        for row, name in enumerate(MODELS)
        for column, split in enumerate(SPLITS)
    ],
)
def test_tokens_are_those_of_one_rank(folders, name, tp, ep):
    """Prefilled eagerly and decoded from captured graphs, alone and together."""
    path, expected = folders(name)
    redundant = -MODELS[name] % ep  # what makes it spread evenly
    with Ranks(path, tp, ep, redundant_experts=redundant) as ranks:
        assert ranks.tokens(PROMPTS) == expected
        assert ranks.tokens(PROMPTS) == expected


@pytest.mark.parametrize(("tp", "ep", "redundant"), [(1, 2, 2), (1, 2, 8), (2, 2, 4), (1, 4, 4)])
def test_replicas_change_no_token(dots, tp, ep, redundant):
    """Rows take turns among them, and each goes through just one."""
    path, expected = dots
    with Ranks(path, tp, ep, redundant_experts=redundant) as ranks:
        assert ranks.tokens(PROMPTS) == expected
        held = [len(group) for group in ranks.map.layers[LAYER]]
        assert held == [(EXPERTS + redundant) // ep] * ep
        turns = torch.stack([rank.model.placement[LAYER] for rank in ranks.ranks[::tp]])
        assert torch.equal((turns >= 0).sum(0), torch.ones_like(turns[0]))
        for group, held in enumerate(ranks.map.layers[LAYER]):
            assert all((turns[group, expert] >= 0).any() for expert in held)


def test_a_row_goes_through_one_replica(dots):
    """The parts of all ranks add up to what a rank computes that holds everything."""
    path, _ = dots
    with Ranks(path) as whole, Ranks(path, 1, 2, redundant_experts=8) as ranks:
        layer = whole.ranks[0].model.layers[LAYER]
        hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
        chosen = torch.arange(27).reshape(9, 3) % EXPERTS
        weights = torch.rand(9, 3, generator=torch.Generator().manual_seed(4))

        def part(rank):
            mine = rank.model.layers[LAYER]
            return mix(hidden, chosen, weights, mine.placement, mine.experts)

        parts = [part(rank) for rank in ranks.ranks]
        assert all(part.abs().sum(1).bool().any() for part in parts)
        expected = mix(hidden, chosen, weights, layer.placement, layer.experts)
        assert torch.allclose(sum(parts), expected, atol=1e-5)


MIXED = ((0, 5, 2, 7, 4), (1, 3, 6, 4, 0))


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_move_in_mid_stream(dots, tp):
    """Tokens go on as if nothing had happened; bytes, names and map say what has."""
    path, expected = dots
    with Ranks(path, tp, 2, redundant_experts=2) as ranks:
        addresses = [rank.arena.address for rank in ranks.ranks]
        read = [rank.arena._memory.sequence for rank in ranks.ranks]
        before = ranks.digests()
        sequences = [Sequence(p, first_block=8 * n) for n, p in enumerate(PROMPTS)]
        for sequence in sequences:
            sequence.take(ranks.step((sequence.row(),)).tokens[0])
        for step in range(10):
            if step == 3:
                ranks.move(LAYER, MIXED)
            if step == 6:
                ranks.move(2, MIXED[::-1])
            ranks.decode(sequences)
        assert [sequence.output for sequence in sequences] == expected
        assert (ranks.map.layers[LAYER], ranks.map.layers[2]) == (MIXED, MIXED[::-1])
        assert [rank.arena.address for rank in ranks.ranks] == addresses
        assert [rank.arena._memory.sequence - 4 for rank in ranks.ranks] == read
        known = {name: digest for one in before[::tp] for name, digest in one.items()}
        for group, (rank, found) in enumerate(zip(ranks.ranks[::tp], ranks.digests()[::tp],
                                                  strict=True)):  # fmt: skip
            names = [f"layer.{LAYER}.expert.{e}" for e in MIXED[group]]
            units = [unit.name for unit in rank.arena.manifest.units]
            assert [name for name in units if name.startswith(f"layer.{LAYER}.exp")] == names
            assert {name: known[name] for name in found} == found
        _names_what_it_holds(ranks)
        assert ranks.tokens(PROMPTS) == expected


def _names_what_it_holds(ranks):
    """What the arena says is what a fresh plan for the same map would say."""
    for rank, start in zip(ranks.ranks, ranks.starts, strict=True):
        config = msgspec.structs.replace(start.config, expert_map=ranks.map.layers)
        fresh = plan(msgspec.structs.replace(start, config=config))
        assert rank.arena.manifest == fresh.manifest
        assert list(rank.arena.tensors) == [t.name for u in fresh.manifest.units for t in u.tensors]
        fresh.memory.mapping.close()


@pytest.mark.parametrize("weight_format", ["plain", "fp8"])
def test_weights_that_are_read_after_a_move(dots, tmp_path, weight_format):
    """Each slot gets what belongs to the expert that it holds by then, not at the start."""
    path, _ = dots
    other = make("dots1", tmp_path, num_key_value_heads=4)
    with torch.no_grad():
        for tensor in other.model.state_dict().values():
            tensor.mul_(1.25)
    other.model.save_pretrained(tmp_path, max_shard_size="100KB")
    with Ranks(path, 1, 2, redundant_experts=2, weight_format=weight_format) as ranks:
        ranks.move(LAYER, MIXED)
        for rank in ranks.ranks:
            slices = llama_format.checkpoint_slices(rank.config, rank.shard)
            computed = llama_format.computed_tensors(rank.config)
            unread = llama_format.unread_by(rank.config, rank.shard)
            rank.arena._bytes.zero_()
            options = LoadOptions(unread=unread)
            load(rank.arena, tmp_path, slices, computed, rank.model.matrices(), options=options)
        found = ranks.tokens(PROMPTS)
        for rank in ranks.ranks:
            for expert, (gate_up, down) in zip(
                MIXED[rank.shard.experts.rank], rank.model.layers[LAYER].experts, strict=True
            ):
                stored = other.model.model.layers[LAYER].mlp.experts
                if weight_format == "plain":
                    assert torch.equal(gate_up.tensors[0], stored.gate_up_proj[expert])
                    assert torch.equal(down.tensors[0], stored.down_proj[expert])
    assert found == alone(tmp_path, PROMPTS, weight_format=weight_format)


# What goes wrong


def _unchanged(ranks, expected, before):
    assert ranks.digests() == before
    assert ranks.tokens(PROMPTS) == expected
    assert all(
        isinstance(answer, WrongState) for answer in ranks.each(lambda rank: rank.experts.move())
    )


def test_bytes_that_are_not_the_senders_change_nothing(dots):
    """The rank that got them names layer, expert and group; no rank moves anything."""
    path, expected = dots
    with Ranks(path, 1, 2, redundant_experts=2) as ranks:
        before, linear = ranks.digests(), ranks.map
        (unit,) = [u for u in ranks.ranks[1].arena.manifest.units if u.name == "layer.1.expert.6"]
        ranks.digests = lambda: before
        ranks.ranks[1].arena.bytes_of(unit)[100] ^= 1
        first, second = ranks.stage(LAYER, ((6, 1, 2, 3, 4), linear.layers[LAYER][1]))
        assert isinstance(first, ArenaError)
        assert "expert 6 of layer 1 came from group 1" in str(first)
        assert not isinstance(second, Exception)
        ranks.ranks[1].arena.bytes_of(unit)[100] ^= 1
        ranks.each(lambda rank: rank.experts.answer(DropExperts()))
        del ranks.digests
        assert ranks.map == linear
        _unchanged(ranks, expected, before)


def test_readers_learn_of_a_move_that_broke_off(dots, monkeypatch):
    """The sequence stays odd: what lies there is no weights that anybody knows."""
    path, _ = dots
    with Ranks(path, 1, 2, redundant_experts=2) as ranks:
        assert not any(isinstance(answer, Exception) for answer in ranks.stage(LAYER, MIXED))
        arena = ranks.ranks[0].arena
        monkeypatch.setattr(arena, "rename", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ranks.ranks[0].experts.move()
        assert arena._memory.sequence % 2


def test_a_rank_without_memory_keeps_nobody_waiting(dots, monkeypatch):
    """It says so, the others that another one said so, and everything is as it was."""
    path, expected = dots
    with Ranks(path, 1, 2, redundant_experts=2) as ranks:
        before, allocate = ranks.digests(), torch.empty_like

        def fail(like):
            if (
                like.data_ptr()
                == ranks.ranks[1].arena.bytes_of(ranks.ranks[1].experts._units(LAYER)[0]).data_ptr()
            ):
                raise RuntimeError("out of memory")
            return allocate(like)

        monkeypatch.setattr(expert_moves.torch, "empty_like", fail)
        first, second = ranks.stage(LAYER, MIXED)
        monkeypatch.undo()
        assert isinstance(first, WrongState)
        assert isinstance(second, ResourceExhausted)
        _unchanged(ranks, expected, before)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"ep": 3}, UnsupportedModel, "8 experts cannot be spread evenly over 3 groups"),
        ({"ep": 2, "redundant_experts": 1}, UnsupportedModel, "8 experts and 1 redundant ones"),
        ({"ep": 1, "redundant_experts": 2}, UnsupportedModel, "10 for each of 1 groups"),
        ({"ep": 2, "redundant_experts": 10}, UnsupportedModel, "9 for each of 2 groups"),
        (
            {"ep": 2, "expert_map": {0: ((0,), (1,)), 1: ((0, 1, 2, 3), (4, 5, 6, 6))}},
            ConfigError,
            "layer 0 has no experts; layer 1, rank 1: expert 6 is there 2 times; layer 1: nobody",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_at_the_start(dots, settings, error, words):
    """With the numbers, before anything is allocated."""
    path, _ = dots
    settings = dict(settings)
    ep = settings.pop("ep")
    start = start_message(path, world_size=ep, expert_parallel_size=ep, **settings)
    with pytest.raises(error, match=words):
        plan(start)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"world_size": 2, "expert_parallel_size": 2}, UnsupportedModel),
        ({"redundant_experts": 1}, UnsupportedModel),
        ({"expert_map": {0: ((0,),)}}, ConfigError),
        ({"world_size": 3, "expert_parallel_size": 2}, ConfigError),
    ],
)
def test_a_model_without_experts_has_none_to_spread(tied, settings, error):
    """The refusal says so."""
    with pytest.raises(error, match=r"experts|groups"):
        plan(start_message(tied, **settings))
