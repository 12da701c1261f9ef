"""What a rank holds of a layer, and from which checkpoint tensors. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine_service.device.config import ModelConfig
from engine_service.device.models.families import FAMILIES, Experts
from engine_service.device.models.routing import MoE
from engine_service.device.sharding import Shard, Slice, kv_shard

_MLP = ("gate_proj", "up_proj", "down_proj")


class Held(NamedTuple):
    """One matrix or vector of a rank, and the checkpoint tensors that are its rows."""

    name: str
    parts: dict[str, Slice]
    exact: bool = False
    """Whether it stays float32 and out of formats: it is small, and decides."""


def layer_units(config: ModelConfig, shard: Shard, index: int) -> Iterator[tuple[str, list[Held]]]:
    """Yields a layer's units: what every token goes through, then the expert in each slot."""
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
    for expert in shard.slots(index, moe.experts):
        unit = f"{own}expert.{expert}"
        within = f"{block}.experts.{expert}"
        yield unit, list(_mlp(f"{unit}.", within, known.matrices, sizes, shard))


def _attention(config: ModelConfig, shard: Shard, own: str, stored: str) -> Iterator[Held]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, keys, attention = config.hidden_size, kv_shard(config, shard), f"{stored}self_attn."
    rows = {"q_proj": (query, shard), "k_proj": (key, keys), "v_proj": (key, keys)}

    def fused(kind: str, *columns: int) -> dict[str, Slice]:
        return {
            f"{attention}{name}.{kind}": Slice.by_rows((size, *columns), part)
            for name, (size, part) in rows.items()
        }

    yield _whole(f"{own}input_norm", f"{stored}input_layernorm.weight", hidden)
    yield Held(f"{own}qkv", fused("weight", hidden))
    if config.qkv_bias:
        yield Held(f"{own}qkv_bias", fused("bias"))
    output = Slice.by_columns((hidden, query), shard)
    yield Held(f"{own}output", {f"{attention}o_proj.weight": output})
    if config.output_bias:
        yield _whole(f"{own}output_bias", f"{attention}o_proj.bias", hidden)
    if config.qk_norm:
        yield _whole(f"{own}query_norm", f"{attention}q_norm.weight", config.head_dim)
        yield _whole(f"{own}key_norm", f"{attention}k_norm.weight", config.head_dim)
    yield _whole(f"{own}post_norm", f"{stored}post_attention_layernorm.weight", hidden)


def _mlp(
    own: str, block: str, names: tuple[str, str, str], sizes: tuple[int, int], shard: Shard,
    *, biased: bool = False,
) -> Iterator[Held]:  # fmt: skip
    """Yields a gated feed-forward; `sizes` are those of its input and of its middle."""
    (hidden, ffn), (*fused, down) = sizes, names
    rows = Slice.by_rows((ffn, hidden), shard)
    yield Held(f"{own}gate_up", {f"{block}.{name}.weight": rows for name in fused})
    if biased:
        part = Slice.by_rows((ffn,), shard)
        yield Held(f"{own}gate_up_bias", {f"{block}.{name}.bias": part for name in fused})
    columns = Slice.by_columns((hidden, ffn), shard)
    yield Held(f"{own}down", {f"{block}.{down}.weight": columns})
    if biased:
        yield _whole(f"{own}down_bias", f"{block}.{down}.bias", hidden)


def _routing(
    hidden: int, moe: MoE, known: Experts, shard: Shard, own: str, block: str
) -> Iterator[Held]:
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


def _whole(name: str, stored: str, *shape: int, exact: bool = False) -> Held:
    return Held(name, {stored: Slice.by_rows(shape)}, exact)
