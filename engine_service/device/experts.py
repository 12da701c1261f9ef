"""Sparse feed-forward: each token goes through the few experts that it chooses.

What a token chooses is computed by ordinary operators. Which rows then go through which
expert depends on that, so a captured graph holds one call: it reads the choice when it is
replayed. A map says which physical slot of this rank holds a logical expert; rows take turns
among the replicas of one, so that just one rank computes each row of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from engine_service.device.formats import int8
from engine_service.device.formats.linear import Linear, multiply
from engine_service.device.layers import gated
from engine_service.device.models.routing import MoE
from engine_service.device.parallel import all_largest

Slot = tuple[Linear, Linear]
"""The matrices of one physical expert: gate and up together, and down."""
_Stored = tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...]], ...]
_Inner = tuple[int, Tensor, Tensor, Tensor]
"""A slot, the rows and choices that lead there, and what its first half made of them."""
_LEAST = -1e6
"""How an expert is judged that nobody holds: below all others, but a number that can be added."""
_TINY = 1e-20
"""Keeps weights finite where every score has vanished."""


def choose(
    logits: Tensor, correction: Tensor | None, moe: MoE, lost: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses experts.

    Args:
        logits: The router's, float32 `[tokens, experts]`.
        correction: Bias of each expert in the choice (arxiv.org/abs/2408.15664), or none.
        moe: How to choose.
        lost: Which experts nobody holds, bool `[experts]`, or none. Others are chosen in their
            place; one that has to be chosen all the same weighs nothing.

    Returns:
        The chosen experts, int64 `[tokens, top_k]`, and their weights, float32.
    """
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    judged = scores if correction is None else scores + correction
    if lost is not None:
        scores, judged = scores.masked_fill(lost, 0.0), judged.masked_fill(lost, _LEAST)
    if moe.groups > 1:
        judged = _within_best_groups(judged, moe)
    chosen = judged.topk(moe.top_k, -1)[1]
    weights = scores.gather(1, chosen)
    if moe.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return chosen, weights * moe.scale


def mix(
    hidden: Tensor, chosen: Tensor, weights: Tensor, placement: Tensor, slots: Sequence[Slot]
) -> Tensor:
    """Sums what the chosen experts make of each row, by their weights.

    Args:
        hidden: `[tokens, hidden_size]`.
        chosen: Logical experts, int64 `[tokens, top_k]`.
        weights: Float32, like `chosen`.
        placement: The slot that serves each logical expert at each turn, int64
            `[experts, turns]`; -1 where another rank does, whose part is then left out.
        slots: The physical experts of this rank.

    Returns:
        `[tokens, hidden_size]`; of several ranks, this one's part.
    """
    stored = tuple((gate_up.tensors, down.tensors) for gate_up, down in slots)
    down = slots[0][1]
    return _mix(hidden, chosen, weights, placement, stored, down.layout.name, down.across)


def _within_best_groups(judged: Tensor, moe: MoE) -> Tensor:
    """Leaves the experts of the best groups to choose from (arxiv.org/abs/2412.19437)."""
    by_group = judged.view(-1, moe.groups, moe.experts // moe.groups)
    worth = by_group.topk(moe.group_best, -1)[0].sum(-1)
    best = worth.topk(moe.top_groups, -1)[1]
    others = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, value=False)
    return by_group.masked_fill(others.unsqueeze(-1), -math.inf).flatten(1)


def _mix(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    placement: Tensor,
    stored: _Stored,
    form: str,
    across: str,
) -> Tensor:
    if has_torch_function((hidden,)):  # being traced: one call in the graph
        traced: Tensor = handle_torch_function(
            _mix, (hidden,), hidden, chosen, weights, placement, stored, form, across
        )
        return traced
    compute = _on_host if hidden.device.type == "cpu" else _on_device
    slots = placement[chosen, _turns(chosen, placement.shape[1])]
    return compute(hidden, slots, weights, stored, form, across).to(hidden.dtype)


def _turns(chosen: Tensor, count: int) -> Tensor:
    """Rows, and experts among each other, are out of step: no rank gets all the first turns."""
    rows = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
    return (rows + chosen) % count


def _on_host(
    hidden: Tensor, slots: Tensor, weights: Tensor, stored: _Stored, form: str, across: str
) -> Tensor:
    """Each expert computes the rows that chose it, and one that nobody chose is not read."""
    total, inner = hidden.new_zeros(hidden.shape, dtype=torch.float32), []
    for slot in sorted(set(slots.flatten().tolist()) - {-1}):
        rows, columns = torch.where(slots == slot)
        inner.append((slot, rows, columns, gated(multiply(hidden[rows], stored[slot][0], form))))
    largest = _largest(slots, inner, across) if across else None
    for slot, rows, columns, middle in inner:
        most = None if largest is None else largest[rows, columns].unsqueeze(1)
        made = multiply(middle, stored[slot][1], form, most)
        total.index_add_(0, rows, made.float() * weights[rows, columns].unsqueeze(1))
    return total


def _largest(slots: Tensor, inner: list[_Inner], across: str) -> Tensor:
    """Returns the largest number of each row's inner rows over all ranks, float32 like `slots`.

    In one exchange, whatever was chosen: ranks that didn't choose alike must not wait.
    """
    own = torch.zeros(slots.shape)
    for _slot, rows, columns, middle in inner:
        own[rows, columns] = int8.largest(middle).squeeze(1)
    return all_largest(own, across)


def _on_device(
    hidden: Tensor, slots: Tensor, weights: Tensor, stored: _Stored, form: str, _across: str
) -> Tensor:
    """Every expert computes every row, since a CUDA graph cannot ask who chose it."""
    total = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    for slot, matrices in enumerate(stored):
        share = (weights * (slots == slot)).sum(-1, keepdim=True)
        total += _expert(hidden, matrices, form).float() * share
    return total


def _expert(
    rows: Tensor, matrices: tuple[tuple[Tensor, ...], tuple[Tensor, ...]], form: str
) -> Tensor:
    gate_up, down = matrices
    return multiply(gated(multiply(rows, gate_up, form)), down, form)
