"""Missing experts move whole, in every format, out of ranks that hold them elsewhere."""

import json

import pytest
import torch
from format_cases import serves
from tiny_llama import start_message

from engine_service.core.parcel import parcels_of
from engine_service.core.recovery_plan import Missing
from engine_service.device import plan
from engine_service.device.formats.layouts import LAYOUTS
from relay_service.core.dtypes import DType
from relay_service.core.holder import Holder
from relay_service.core.planner import Planner

CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 2, "mlp_only_layers": [0],
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 256, "num_experts": 4,
    "num_experts_per_tok": 1, "shared_expert_intermediate_size": 256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
ELSEWHERE = {1: ((3, 1), (0, 2))}


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Lays out the ranks of two groups, without memory."""
    monkeypatch.setattr(plan, "allocate", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def lay_out(held, dtype, parts, **changes):
        settings = {"world_size": 2 * parts, "expert_parallel_size": 2, "weight_format": held}
        return [
            plan.plan(start_message(tmp_path, dtype, rank=rank, **settings, **changes)).manifest
            for rank in range(2 * parts)
        ]

    return lay_out


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("held", LAYOUTS)
def test_missing_experts_move_whole(ranks, held, parts):
    """Each is one copy of one unit, from a rank that has the same part of it."""
    dtype = "float32" if DType.F32 in LAYOUTS[held].types else "bfloat16"
    if not serves(held, getattr(torch, dtype)):
        pytest.skip(f"{held} cannot serve here")
    mine = ranks(held, dtype, parts)
    lost = [
        Missing(rank % parts, unit)
        for rank, manifest in enumerate(mine)
        for unit in manifest.units
        if unit.name in ("layer.1.expert.2", "layer.1.expert.3")
    ]
    sources = ranks(held, dtype, parts, expert_map=ELSEWHERE)
    planner = Planner([Holder(f"seed rank {one.rank}", one) for one in sources])
    for parcel in parcels_of(lost):
        copies = planner.plan(Holder("parcel", parcel.layout(parcel.missing, parcel.part)))
        found = [(c.unit, c.nbytes, c.count, c.target_offset, c.source) for c in copies]
        groups = {"layer.1.expert.2": 1, "layer.1.expert.3": 0}
        assert found == [
            (u.name, u.nbytes, 1, u.offset, groups[u.name] * parts + parcel.part)
            for u in parcel.manifest.units
        ]
