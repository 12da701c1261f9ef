"""The kernel format of Llama models: which tensors an arena holds, and from what.

Query, key and value projections are fused row-wise, and so are gate and up. The
rotary tables are weights like any other, so a target receives them too.
"""

from __future__ import annotations

from torch import Tensor

from engine_service.device.config import ModelConfig
from engine_service.device.layers import rotary_tables
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec

KERNEL_FORMAT = "llama-fused/1"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def facts(config: ModelConfig, dtype: str) -> tuple[tuple[str, str], ...]:
    """Returns, in a fixed order, all that decides what the bytes of an arena mean."""
    return (
        ("kernel_format", KERNEL_FORMAT),
        ("dtype", dtype),
        ("quantization", "none"),
        *((f"config.{name}", str(getattr(config, name))) for name in config.__struct_fields__),
    )


def unit_specs(config: ModelConfig, dtype: DType) -> list[UnitSpec]:
    """Declares every tensor that a forward pass reads, by unit."""
    embed = TensorSpec("embed", dtype, (config.vocab_size, config.hidden_size), logical=EMBEDDING)
    layers = [_layer_unit(config, dtype, index) for index in range(config.layers)]
    return [UnitSpec("embed", (embed,)), *layers, _head_unit(config, dtype), _rotary_unit(config)]


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint must hold, by name."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.layers):
        for name, shape in _layer_shapes(config).items():
            shapes[_layer_name(index, name)] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied:
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def computed_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Computes the tensors that no checkpoint holds, by their name in the arena."""
    cos, sin = rotary_tables(config.max_positions, config.head_dim, config.rope_theta)
    return {"rotary.cos": cos, "rotary.sin": sin}


def _layer_unit(config: ModelConfig, dtype: DType, index: int) -> UnitSpec:
    shapes = _layer_shapes(config)
    fused = {
        "input_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "post_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    tensors = []
    for name, parts in fused.items():
        rows = sum(shapes[part][0] for part in parts)
        shape = (rows, *shapes[parts[0]][1:])
        logical = "+".join(_layer_name(index, part) for part in parts)
        tensors.append(TensorSpec(f"layer.{index}.{name}", dtype, shape, logical=logical))
    return UnitSpec(f"layer.{index}.dense", tuple(tensors))


def _head_unit(config: ModelConfig, dtype: DType) -> UnitSpec:
    norm = TensorSpec("norm", dtype, (config.hidden_size,), logical="model.norm.weight")
    head = TensorSpec(
        "head", dtype, (config.vocab_size, config.hidden_size),
        logical=EMBEDDING if config.tied else HEAD, alias="embed" if config.tied else "",
    )  # fmt: skip
    return UnitSpec("head", (norm, head))


def _rotary_unit(config: ModelConfig) -> UnitSpec:
    shape = (config.max_positions, config.head_dim // 2)
    names = ("rotary.cos", "rotary.sin")
    return UnitSpec(
        "rotary", tuple(TensorSpec(name, DType.F32, shape, kind="buffer") for name in names)
    )


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.ffn_size
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }


def _layer_name(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}.weight"
