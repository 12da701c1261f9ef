"""Reads how tokens find their experts (arxiv.org/abs/2101.03961)."""

from __future__ import annotations

import msgspec

from engine_service.device.models.families import Experts, Family
from engine_service.device.models.raw_config import RawConfig, invalid, require, switched

MAX_EXPERTS = 1 << 19
"""Over all layers: each is a unit of the arena."""


class MoE(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a decoder's sparse layers, and how a token chooses some of them."""

    experts: int
    top_k: int
    """How many experts a token goes through, shared ones not counted."""
    ffn_size: int
    """Of one expert."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have one feed-forward instead."""
    scoring: str = "softmax"
    normalized: bool = False
    corrected: bool = False
    scale: float = 1.0
    """What the weights of the chosen experts are multiplied by."""
    groups: int = 1
    top_groups: int = 1
    """How many groups a token chooses from."""
    group_best: int = 1
    shared_ffn_size: int = 0
    """Of all shared experts together."""
    shared_gate: bool = False


def read_moe(raw: RawConfig, family: Family) -> MoE | None:
    """Returns the experts; none for a model whose layers are all dense.

    Raises `UnsupportedModel` for another way to choose, `ModelError` for what cannot be.
    """
    known = family.experts
    if known is None:
        return None
    _refuse_unknown(raw, known)
    experts, dense = _experts(raw), _dense_layers(raw)
    if not experts or len(dense) == raw.num_hidden_layers:
        return None
    ffn_size = getattr(raw, known.ffn_size)
    if ffn_size is None or raw.num_experts_per_tok is None:
        raise invalid(f"{known.ffn_size} and num_experts_per_tok are missing: it has experts")
    grouped = raw.topk_method != "greedy"
    shared = (raw.shared_expert_intermediate_size or 0) + (raw.n_shared_experts or 0) * ffn_size
    moe = MoE(
        experts=experts,
        top_k=raw.num_experts_per_tok,
        ffn_size=ffn_size,
        dense_layers=dense,
        scoring=known.scoring,
        normalized=switched(raw, known.normalized),
        corrected=known.corrected,
        scale=1.0 if raw.routed_scaling_factor is None else raw.routed_scaling_factor,
        groups=(raw.n_group or 1) if grouped else 1,
        top_groups=(raw.topk_group or 1) if grouped else 1,
        group_best=known.group_best,
        shared_ffn_size=shared if known.shared else 0,
        shared_gate=known.shared_gate,
    )
    _check(moe, raw.num_hidden_layers)
    return moe


def _refuse_unknown(raw: RawConfig, known: Experts) -> None:
    methods = ["noaux_tc"] if known.corrected else ["greedy", "group_limited_greedy"]
    require("scoring_func", raw.scoring_func, [None, known.scoring])
    require("topk_method", raw.topk_method, [None, *methods])
    require("moe_layer_freq", raw.moe_layer_freq, [None, 1])


def _experts(raw: RawConfig) -> int:
    names = (raw.num_experts, raw.num_local_experts, raw.n_routed_experts)
    found = {count for count in names if count is not None}
    if len(found) != 1:
        raise invalid(f"the number of experts is {found or 'missing'}")
    return found.pop()


def _dense_layers(raw: RawConfig) -> tuple[int, ...]:
    first, step = raw.first_k_dense_replace or 0, raw.decoder_sparse_step or 1
    named = set(raw.mlp_only_layers or ())
    return tuple(
        index
        for index in range(raw.num_hidden_layers)
        if index < first or index in named or (index + 1) % step
    )


def _check(moe: MoE, layers: int) -> None:
    if moe.experts * layers > MAX_EXPERTS:
        raise invalid(f"{moe.experts} experts in {layers} layers are more than {MAX_EXPERTS}")
    if moe.experts % moe.groups or moe.top_groups > moe.groups:
        raise invalid(
            f"{moe.top_groups} of {moe.groups} groups cannot be chosen among {moe.experts} experts"
        )
    per_group = moe.experts // moe.groups
    if moe.top_k > per_group * moe.top_groups:
        raise invalid(f"{moe.top_k} experts cannot be chosen, {per_group * moe.top_groups} are")
    if moe.groups > 1 and moe.group_best > per_group:
        raise invalid(f"a group of {per_group} experts is judged by its best {moe.group_best}")
