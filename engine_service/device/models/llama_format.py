"""The kernel format of Llama models: which tensors an arena holds, and from what.

Query, key and value projections are fused row-wise, and so are gate and up. The
rotary tables are weights like any other, so a target receives them too.

Of several ranks each holds its heads (rows of qkv, columns of output), its part of the
feed-forward (rows of gate and up, columns of down) and its part of the vocabulary; norms
and rotary tables are held by all. The embedding is cut by vocabulary like the head, at
the price of one more all-reduce per pass: a tied head stays the embedding itself, and no
rank holds rows that it doesn't multiply with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_service.device.config import ModelConfig
from engine_service.device.formats.layouts import PLAIN, Layout
from engine_service.device.sharding import WHOLE, Shard, Slice, kv_shard
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_FORMAT = "llama-fused/1"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def facts(config: ModelConfig, dtype: str, layout: Layout = PLAIN) -> tuple[tuple[str, str], ...]:
    """Returns, in a fixed order, all that decides what the bytes of an arena mean."""
    return (
        ("kernel_format", KERNEL_FORMAT),
        ("dtype", dtype),
        *layout.facts(),
        *((f"config.{name}", str(getattr(config, name))) for name in config.__struct_fields__),
    )


def unit_specs(
    config: ModelConfig, dtype: DType, shard: Shard = WHOLE, layout: Layout = PLAIN
) -> list[UnitSpec]:
    """Declares every tensor that a rank's forward pass reads, by unit."""
    vocabulary = _vocabulary(config, shard).shape
    embed = TensorSpec("embed", dtype, vocabulary, logical=EMBEDDING)
    layers = [_layer_unit(config, dtype, index, shard, layout) for index in range(config.layers)]
    head = _head_unit(config, dtype, vocabulary, layout.of_head)
    return [UnitSpec("embed", (embed,)), *layers, head, _rotary_unit(config)]


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint must hold, by name."""
    return {name: piece.whole for name, piece in checkpoint_slices(config).items()}


def checkpoint_slices(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, Slice]:
    """Returns what a rank holds of every tensor that a checkpoint must hold, by name."""
    slices = {EMBEDDING: _vocabulary(config, shard)}
    for index in range(config.layers):
        for name, piece in _layer_slices(config, shard).items():
            slices[_layer_name(index, name)] = piece
    slices["model.norm.weight"] = Slice.by_rows((config.hidden_size,))
    if not config.tied:
        slices[HEAD] = slices[EMBEDDING]
    return slices


def computed_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Computes the tensors that no checkpoint holds, by their name in the arena."""
    # Here, so that a layout can be planned before torch is imported.
    from engine_service.device.layers import rotary_tables

    cos, sin = rotary_tables(config.max_positions, config.head_dim, config.rope_theta)
    return {"rotary.cos": cos, "rotary.sin": sin}


def _layer_unit(
    config: ModelConfig, dtype: DType, index: int, shard: Shard, layout: Layout
) -> UnitSpec:
    slices = _layer_slices(config, shard)
    fused = {
        "input_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "post_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    tensors: list[TensorSpec] = []
    for name, parts in fused.items():
        own = f"layer.{index}.{name}"
        rows = sum(slices[part].rows[1] for part in parts)
        shape = (rows, *slices[parts[0]].shape[1:])
        logical = "+".join(_layer_name(index, part) for part in parts)
        if len(shape) > 1:
            tensors += layout.specs(own, dtype, shape, logical)
        else:
            tensors.append(TensorSpec(own, dtype, shape, logical=logical))
    return UnitSpec(f"layer.{index}.dense", tuple(tensors))


def _head_unit(
    config: ModelConfig, dtype: DType, vocabulary: tuple[int, ...], layout: Layout
) -> UnitSpec:
    """A tied head is the embedding itself where its format keeps a checkpoint's bytes."""
    norm = TensorSpec("norm", dtype, (config.hidden_size,), logical="model.norm.weight")
    if config.tied and layout.streams:
        head = [TensorSpec("head", dtype, vocabulary, logical=EMBEDDING, alias="embed")]
    else:
        head = layout.specs("head", dtype, vocabulary, EMBEDDING if config.tied else HEAD)
    return UnitSpec("head", (norm, *head))


def _rotary_unit(config: ModelConfig) -> UnitSpec:
    shape = (config.max_positions, config.head_dim // 2)
    names = ("rotary.cos", "rotary.sin")
    return UnitSpec(
        "rotary", tuple(TensorSpec(name, DType.F32, shape, kind="buffer") for name in names)
    )


def _vocabulary(config: ModelConfig, shard: Shard) -> Slice:
    return Slice.by_rows((config.vocab_size, config.hidden_size), shard)


def _layer_slices(config: ModelConfig, shard: Shard) -> dict[str, Slice]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.ffn_size
    keys = Slice.by_rows((key, hidden), kv_shard(config, shard))
    return {
        "input_layernorm": Slice.by_rows((hidden,)),
        "self_attn.q_proj": Slice.by_rows((query, hidden), shard),
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "self_attn.o_proj": Slice.by_columns((hidden, query), shard),
        "post_attention_layernorm": Slice.by_rows((hidden,)),
        "mlp.gate_proj": Slice.by_rows((ffn, hidden), shard),
        "mlp.up_proj": Slice.by_rows((ffn, hidden), shard),
        "mlp.down_proj": Slice.by_columns((hidden, ffn), shard),
    }


def _layer_name(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}.weight"
