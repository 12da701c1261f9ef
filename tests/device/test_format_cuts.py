"""Ranks are filled from ranks of another number, in every format that can be cut.

Plans are made from what the arenas' manifests say and carried out byte by byte; the result must
be what a target of that size loads from the checkpoint itself.
"""

import functools
import json

import pytest
import torch
from cutting import carry_out
from format_cases import CASES, rounds, serves
from oracles import FAMILIES, make
from safetensors.torch import load_file, save_file
from tiny_llama import rank_part, write_checkpoint

from engine_service.device.sharding import Shard
from relay_service.core.holder import Holder
from relay_service.core.planner import Planner
from relay_service.errors import FormatMismatch

FILE = "model.safetensors"
ALIGNED = {
    "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 2, "mlp_only_layers": [0],
    "hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 128,
    "intermediate_size": 768, "moe_intermediate_size": 768, "vocab_size": 768, "num_experts": 2,
    "num_experts_per_tok": 1, "shared_expert_intermediate_size": 768,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Every part of up to three ranks ends between two tiles of any format."""
COPIED = {
    "hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 1, "mlp_bias": True,
    "attention_bias": True,
}  # fmt: skip
"""Four ranks hold each key-value head twice. The head is the embedding."""
SIZES = {
    "one to three": (ALIGNED, 1, 3), "three to one": (ALIGNED, 3, 1),
    "two to three": (ALIGNED, 2, 3), "three to two": (ALIGNED, 3, 2),
    "one to four": (COPIED, 1, 4), "four to two": (COPIED, 4, 2), "two to one": (COPIED, 2, 1),
}  # fmt: skip
CUT = [one for one in CASES if not one.id.startswith("int4")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Loads a model over so many ranks, once: their manifests and their bytes."""
    folders = {}

    @functools.cache
    def ranks_of(changes, name, dtype, ranks):
        if changes not in folders:
            folder = tmp_path_factory.mktemp("cut")
            folders[changes] = write_checkpoint(folder, **json.loads(changes))
        return _loaded(folders[changes], name, dtype, ranks)

    def load(changes, name, dtype, ranks):
        return ranks_of(json.dumps(changes), name, dtype, ranks)

    return load


def _loaded(folder, name, dtype, ranks):
    found = []
    for rank in range(ranks):
        arena, _ = rank_part(folder, name, dtype, Shard(rank, ranks))
        manifest = arena.digested()
        held = bytes(arena.view(0, manifest.data_bytes))
        found.append((Holder(f"{ranks} ranks, rank {rank}", manifest), held))
    return found


def _check_filled(sources, targets):
    """Fills each target from the sources, and compares it with what it loaded itself."""
    planner = Planner([holder for holder, _ in sources])
    for target, expected in targets:
        copies = planner.plan(target)
        found = carry_out(copies, [held for _, held in sources], target.manifest.data_bytes)
        for entry in (one for unit in target.manifest.units for one in unit.tensors):
            span = slice(entry.offset, entry.offset + entry.nbytes)
            assert found[span] == expected[span], entry.name
        assert found == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), CUT)
def test_a_rank_is_cut_out_of_others(loaded, name, dtype, size):
    """Dense and sparse layers, biases, shared experts, a gate, a head in a format of its own."""
    model, sources, targets = SIZES[size]
    _check_filled(loaded(model, name, dtype, sources), loaded(model, name, dtype, targets))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_cut_in_its_own_type(tmp_path, family):
    """Sizes are small and odd, which rows and columns don't mind."""
    folder = make(family, tmp_path).folder
    one, two = (_loaded(folder, "plain", torch.float32, ranks) for ranks in (1, 2))
    _check_filled(one, two)
    _check_filled(two, one)


SMALL = {"vocab_size": 200, "num_hidden_layers": 1}
EVEN_HEADS = SMALL | {"num_key_value_heads": 4, "head_dim": 64}
REFUSED = {
    "packed, a seam": ("packed", SMALL, "layer.0.qkv .*tiles of .*, and a tile of .* two parts"),
    "packed, an edge": ("packed", EVEN_HEADS, "layer.0.gate_up .*and a tile of .* two parts"),
    "packed, padded": ("packed", ALIGNED | {"hidden_size": 48}, "output .*have padded rows"),
    "packed, narrow": ("packed", EVEN_HEADS | {"hidden_size": 16}, "qkv .*wider than it is"),
    "int8, a seam": ("int8", SMALL, "layer.0.qkv .*and a tile of 64 rows spans two parts"),
    "int8, padded": ("int8", ALIGNED | {"hidden_size": 96}, "output .*have padded rows"),
    "int4": ("int4", ALIGNED, "qkv .*in groups of 64 columns that count from its own first"),
    "fp8": ("fp8", EVEN_HEADS, "scaled in tiles of 128 by 128, and a tile of 128 rows spans"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["one to two", "two to one"])
def test_what_cannot_be_cut_is_refused_with_the_reason(loaded, case, sizes):
    """Whether the source holds it so, or the target would; the same placement is a copy."""
    name, model, words = REFUSED[case]
    if not serves(name, torch.bfloat16):
        pytest.skip("not on this processor")
    sources, targets = (loaded(model, name, torch.bfloat16, ranks) for ranks in sizes)
    _check_filled(sources, sources)
    with pytest.raises(FormatMismatch, match=words):
        _check_filled(sources, targets)


@rounds
@pytest.mark.parametrize("size", ["one to three", "three to two"])
def test_float8_checkpoints_are_cut_as_whole_numbers(tmp_path, size):
    """Rows are read whole there too, block by block, to find what they are scaled by."""
    model, sources, targets = SIZES[size]
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = write_checkpoint(tmp_path, **model, quantization_config=config)
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if "_proj" in name and name.endswith("weight")]:
        blocks = [-(-size // 128) for size in tensors[name].shape]
        tensors[f"{name}_scale_inv"] = torch.rand(blocks) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / FILE)
    one, other = (_loaded(folder, "int8", torch.bfloat16, n) for n in (sources, targets))
    _check_filled(one, other)


@rounds
def test_whole_numbers_do_not_depend_on_the_ranks(tmp_path):
    """Those of columns that are cut neither, whatever the sizes: the scale is the row's."""
    folder = write_checkpoint(
        tmp_path,
        **SMALL,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=10,
        intermediate_size=150,
    )
    (alone,) = _numbers(folder, 1)
    for ranks in (2, 3, 6):
        parts = _numbers(folder, ranks)
        assert all(torch.equal(scale, alone[1]) for _, scale in parts)
        assert torch.equal(torch.cat([numbers for numbers, _ in parts], 1), alone[0])


@torch.inference_mode()
def _numbers(folder, ranks):
    """Returns what each rank holds of a matrix whose columns are cut, and the scales of rows."""
    found = []
    for rank in range(ranks):
        down = rank_part(folder, "int8", torch.float32, Shard(rank, ranks))[1].layers[0].down
        found.append((down(torch.eye(down.shape[1])).T, down.tensors[1]))
    return found
