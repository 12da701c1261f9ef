"""The arenas of several ranks hold together what one rank's holds; uneven splits are refused."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import serving_rank, write_checkpoint

from engine_service.device.config import ModelConfig
from engine_service.device.dtypes import served_dtype
from engine_service.device.loading import load
from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.models.llama_format import (
    checkpoint_slices,
    computed_tensors,
    unit_specs,
)
from engine_service.device.models.routing import MoE
from engine_service.device.sharding import Shard, Slice, check_divides, rank_config
from engine_service.errors import UnsupportedModel
from relay_service.core.layout import lay_out

SHAPE = {"vocab_size": 204, "num_attention_heads": 12, "head_dim": 16, "intermediate_size": 96}


MOE = MoE(experts=4, top_k=2, ffn_size=32, shared_ffn_size=18)


def _rank_arena(folder, config, shard, served="float32"):
    arena = MemfdArena(
        lay_out(shard.rank, unit_specs(config, served_dtype(served), shard)), "tests"
    )
    slices = checkpoint_slices(config, shard)
    manifest, report = load(arena, folder, slices, computed_tensors(config))
    assert manifest == arena.digested()
    itemsize = torch.float32.itemsize  # as the checkpoint has it
    assert report.bytes_read == itemsize * sum(piece.elements for piece in slices.values())
    return arena


def _parts(fused: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    sizes = [config.heads, config.kv_heads, config.kv_heads]
    return list(fused.split([size * config.head_dim for size in sizes]))


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kv_heads", "ranks"), [(6, 2), (6, 3), (3, 6), (2, 4), (1, 3), (12, 12)])
def test_the_parts_of_all_ranks_are_the_whole(tmp_path, kv_heads, ranks, tied, served):
    """Joined in their order they equal one rank's tensors; key-value heads may be copies."""
    folder = write_checkpoint(
        tmp_path, num_key_value_heads=kv_heads, tie_word_embeddings=tied, **SHAPE
    )
    alone = serving_rank(folder, served)
    config, whole = alone.config, alone.arena.tensors
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    arenas = [_rank_arena(folder, config, shard, served) for shard in shards]
    held = [arena.tensors for arena in arenas]
    assert all(list(tensors) == list(whole) for tensors in held)
    own = [rank_config(config, shard) for shard in shards]
    for name, expected in whole.items():
        mine, kind = [tensors[name] for tensors in held], name.rpartition(".")[2]
        if kind in ("embed", "head"):
            assert torch.equal(torch.cat(mine), expected)
        elif kind in ("output", "down"):
            assert torch.equal(torch.cat(mine, 1), expected)
        elif kind == "gate_up":
            halves = [tensor.chunk(2) for tensor in mine]
            joined = torch.cat([torch.cat(side) for side in zip(*halves, strict=True)])
            assert torch.equal(joined, expected)
        elif kind == "qkv":
            split = [_parts(tensor, one) for tensor, one in zip(mine, own, strict=True)]
            query, *keys_values = _parts(expected, config)
            assert torch.equal(torch.cat([parts[0] for parts in split]), query)
            for number, heads in enumerate(keys_values, 1):
                _assert_copies([parts[number] for parts in split], heads, config)
        else:
            assert all(torch.equal(tensor, expected) for tensor in mine)


def _assert_copies(mine, heads, config):
    """Rank r's queries read head `r * kv_heads // ranks` and those that follow it."""
    by_head = heads.view(config.kv_heads, config.head_dim, -1)
    for rank, tensor in enumerate(mine):
        own = tensor.view(-1, config.head_dim, tensor.shape[1])
        first = rank * config.kv_heads // len(mine)
        assert torch.equal(own, by_head[first : first + len(own)])


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"heads": 9}, 2, "9 heads cannot be split over 2 ranks"),
        ({"ffn_size": 100}, 3, "100 feed-forward rows cannot be split over 3 ranks"),
        ({"vocab_size": 199}, 2, "199 tokens of vocabulary cannot be split over 2 ranks"),
        ({"kv_heads": 4}, 6, "4 key-value heads cannot be split over 6 ranks"),
        ({"kv_heads": 6}, 4, "6 key-value heads cannot be split over 4 ranks"),
        ({"moe": MOE}, 3, "32 feed-forward rows of an expert cannot be split over 3 ranks"),
        ({"moe": MOE}, 4, "18 feed-forward rows of the shared experts cannot be split over 4"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(changes, ranks, words):
    """Every refusal says how many of what, and over how many ranks."""
    sizes = {"heads": 12, "kv_heads": 12, "ffn_size": 96, "vocab_size": 204} | changes
    config = ModelConfig(
        hidden_size=64, layers=1, head_dim=16, tied=True, norm_eps=1e-5,
        max_positions=128, **sizes,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match=words):
        check_divides(config, ranks)
    check_divides(config, 1)


def test_rows_that_no_layer_has_need_not_divide():
    """Where every layer is sparse, the size of a dense one means nothing."""
    config = ModelConfig(
        hidden_size=64, layers=2, heads=4, kv_heads=4, head_dim=16, ffn_size=97, vocab_size=200,
        tied=True, norm_eps=1e-5, max_positions=128, moe=MOE,
    )  # fmt: skip
    check_divides(config, 2)
    dense = msgspec.structs.replace(MOE, dense_layers=(0,))
    with pytest.raises(UnsupportedModel, match="97 feed-forward rows cannot"):
        check_divides(msgspec.structs.replace(config, moe=dense), 2)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.data())
def test_runs_find_every_element_of_a_slice(ranks, rows, columns, data):
    """Whatever range is asked for, its runs name the very elements, in order."""
    shard = Shard(data.draw(st.integers(0, ranks - 1)), ranks)
    whole = (rows * ranks, columns * ranks)
    numbers = torch.arange(whole[0] * whole[1]).view(whole)
    for piece in (
        Slice.by_rows(whole, shard),
        Slice.by_columns(whole, shard),
        Slice.by_rows(whole),
    ):
        (first, height), (left, width) = piece.rows, piece.columns
        expected = numbers[first : first + height, left : left + width].flatten().tolist()
        start = data.draw(st.integers(0, piece.elements - 1))
        count = data.draw(st.integers(1, piece.elements - start))
        found = [n for run, length in piece.runs(start, count) for n in range(run, run + length)]
        assert found == expected[start : start + count]
