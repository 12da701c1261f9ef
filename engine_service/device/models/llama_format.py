"""The kernel format of decoders: which tensors an arena holds, and from what.

Query, key and value projections are fused row-wise, and so are gate and up. The
rotary tables are weights like any other, so a target receives them too. Each expert is a
unit of its own, named by layer and logical expert wherever it lies.

Of several ranks each holds its heads (rows of qkv, columns of output), its part of every
feed-forward (rows of gate and up, columns of down; also of every expert) and its part of the
vocabulary; norms, routers and rotary tables are held by all, and so is a bias that is added
to a sum over ranks. The embedding is cut by vocabulary like the head, at
the price of one more all-reduce per pass: a tied head stays the embedding itself, and no
rank holds rows that it doesn't multiply with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine_service.device.config import ModelConfig
from engine_service.device.formats.layouts import PLAIN, Layout
from engine_service.device.models.families import FAMILIES, Experts
from engine_service.device.models.routing import MoE
from engine_service.device.sharding import WHOLE, Shard, Slice, kv_shard
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_FORMAT = "llama-fused/1"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_MLP = ("gate_proj", "up_proj", "down_proj")


class _Held(NamedTuple):
    """One matrix or vector of a rank, and the checkpoint tensors that are its rows."""

    name: str
    parts: dict[str, Slice]
    exact: bool = False
    """Whether it stays float32 and out of formats: it is small, and decides."""


def facts(config: ModelConfig, dtype: str, layout: Layout = PLAIN) -> tuple[tuple[str, str], ...]:
    """Returns, in a fixed order, all that decides what the bytes of an arena mean."""
    return (
        ("kernel_format", KERNEL_FORMAT),
        ("dtype", dtype),
        ("weight_format", f"{layout.name}/{layout.version}"),
        *layout.facts(),
        *_facts("config", config),
    )


def unit_specs(
    config: ModelConfig, dtype: DType, shard: Shard = WHOLE, layout: Layout = PLAIN
) -> list[UnitSpec]:
    """Declares every tensor that a rank's forward pass reads, by unit."""
    layers = [
        UnitSpec(unit, tuple(spec for one in held for spec in _specs(one, dtype, layout)))
        for index in range(config.layers)
        for unit, held in _layer_units(config, shard, index)
    ]
    vocabulary = _vocabulary(config, shard).shape
    embed = TensorSpec("embed", dtype, vocabulary, logical=EMBEDDING)
    head = _head_unit(config, dtype, vocabulary, layout)
    return [UnitSpec("embed", (embed,)), *layers, head, _rotary_unit(config)]


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint must hold, by name."""
    return {name: piece.whole for name, piece in checkpoint_slices(config).items()}


def checkpoint_slices(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, Slice]:
    """Returns what a rank holds of every tensor that a checkpoint must hold, by name."""
    slices = {EMBEDDING: _vocabulary(config, shard)}
    for index in range(config.layers):
        for _unit, held in _layer_units(config, shard, index):
            for one in held:
                slices |= one.parts
    slices["model.norm.weight"] = Slice.by_rows((config.hidden_size,))
    if not config.tied:
        slices[HEAD] = slices[EMBEDDING]
    return slices


def computed_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Computes the tensors that no checkpoint holds, by their name in the arena."""
    # Here, so that a layout can be planned before torch is imported.
    from engine_service.device.rotary import rotary_tables

    cos, sin = rotary_tables(config.rope, config.rotary_dim, config.max_positions)
    return {"rotary.cos": cos, "rotary.sin": sin}


def _facts(prefix: str, record: msgspec.Struct) -> Iterator[tuple[str, str]]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, msgspec.Struct):
            yield from _facts(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", str(value)


def _specs(held: _Held, dtype: DType, layout: Layout) -> list[TensorSpec]:
    slices = list(held.parts.values())
    shape = (sum(piece.rows[1] for piece in slices), *slices[0].shape[1:])
    logical = "+".join(held.parts)
    if len(shape) > 1 and not held.exact:
        return layout.specs(held.name, dtype, shape, logical)
    return [TensorSpec(held.name, DType.F32 if held.exact else dtype, shape, logical=logical)]


def _layer_units(
    config: ModelConfig, shard: Shard, index: int
) -> Iterator[tuple[str, list[_Held]]]:
    """Yields a layer's units: what every token goes through, then each expert."""
    own, stored = f"layer.{index}.", f"model.layers.{index}."
    held, moe = list(_attention(config, shard, own, stored)), config.moe
    if moe is None or config.is_dense(index):
        sizes = config.hidden_size, config.ffn_size
        held += _mlp(own, stored + "mlp", _MLP, sizes, shard, biased=config.mlp_bias)
        yield f"{own}dense", held
        return
    known = FAMILIES[config.architecture].experts or Experts()
    block = stored + known.block
    yield f"{own}dense", [*held, *_routing(config.hidden_size, moe, known, shard, own, block)]
    sizes = config.hidden_size, moe.ffn_size
    for expert in range(moe.experts):
        unit = f"{own}expert.{expert}"
        within = f"{block}.experts.{expert}"
        yield unit, list(_mlp(f"{unit}.", within, known.matrices, sizes, shard))


def _attention(config: ModelConfig, shard: Shard, own: str, stored: str) -> Iterator[_Held]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, keys, attention = config.hidden_size, kv_shard(config, shard), f"{stored}self_attn."
    rows = {"q_proj": (query, shard), "k_proj": (key, keys), "v_proj": (key, keys)}

    def fused(kind: str, *columns: int) -> dict[str, Slice]:
        return {
            f"{attention}{name}.{kind}": Slice.by_rows((size, *columns), part)
            for name, (size, part) in rows.items()
        }

    yield _whole(f"{own}input_norm", f"{stored}input_layernorm.weight", hidden)
    yield _Held(f"{own}qkv", fused("weight", hidden))
    if config.qkv_bias:
        yield _Held(f"{own}qkv_bias", fused("bias"))
    output = Slice.by_columns((hidden, query), shard)
    yield _Held(f"{own}output", {f"{attention}o_proj.weight": output})
    if config.output_bias:
        yield _whole(f"{own}output_bias", f"{attention}o_proj.bias", hidden)
    if config.qk_norm:
        yield _whole(f"{own}query_norm", f"{attention}q_norm.weight", config.head_dim)
        yield _whole(f"{own}key_norm", f"{attention}k_norm.weight", config.head_dim)
    yield _whole(f"{own}post_norm", f"{stored}post_attention_layernorm.weight", hidden)


def _mlp(
    own: str, block: str, names: tuple[str, str, str], sizes: tuple[int, int], shard: Shard,
    *, biased: bool = False,
) -> Iterator[_Held]:  # fmt: skip
    """Yields a gated feed-forward; `sizes` are those of its input and of its middle."""
    (hidden, ffn), (*fused, down) = sizes, names
    rows = Slice.by_rows((ffn, hidden), shard)
    yield _Held(f"{own}gate_up", {f"{block}.{name}.weight": rows for name in fused})
    if biased:
        part = Slice.by_rows((ffn,), shard)
        yield _Held(f"{own}gate_up_bias", {f"{block}.{name}.bias": part for name in fused})
    columns = Slice.by_columns((hidden, ffn), shard)
    yield _Held(f"{own}down", {f"{block}.{down}.weight": columns})
    if biased:
        yield _whole(f"{own}down_bias", f"{block}.{down}.bias", hidden)


def _routing(
    hidden: int, moe: MoE, known: Experts, shard: Shard, own: str, block: str
) -> Iterator[_Held]:
    """Yields what chooses among the experts, and those that are shared by all tokens."""
    gate = f"{block}.gate"
    yield _whole(f"{own}router", f"{gate}.weight", moe.experts, hidden, exact=True)
    if moe.corrected:
        correction = f"{gate}.e_score_correction_bias"
        yield _whole(f"{own}correction", correction, moe.experts, exact=True)
    if moe.shared_ffn_size:
        sizes, shared = (hidden, moe.shared_ffn_size), f"{block}.{known.shared}"
        yield from _mlp(f"{own}shared_", shared, _MLP, sizes, shard)
    if moe.shared_ffn_size and moe.shared_gate:
        yield _whole(f"{own}shared_gate", f"{shared}_gate.weight", 1, hidden, exact=True)


def _whole(name: str, stored: str, *shape: int, exact: bool = False) -> _Held:
    return _Held(name, {stored: Slice.by_rows(shape)}, exact)


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
    shape = (config.max_positions, config.rotary_dim // 2)
    names = ("rotary.cos", "rotary.sin")
    return UnitSpec(
        "rotary", tuple(TensorSpec(name, DType.F32, shape, kind="buffer") for name in names)
    )


def _vocabulary(config: ModelConfig, shard: Shard) -> Slice:
    return Slice.by_rows((config.vocab_size, config.hidden_size), shard)
