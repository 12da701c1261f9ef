"""Paged attention as one custom operator, `seedrelay::paged_attention`.

A captured graph holds only the call: how long each context is and where it lies
(arxiv.org/abs/2309.06180) is read from the tensors when the graph is replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_library = torch.library.Library("seedrelay", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor slots, Tensor tables, Tensor lengths) -> Tensor"
)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, tables: Tensor, lengths: Tensor,
) -> Tensor:  # fmt: skip
    """Stores new keys and values, then attends to each sequence's whole context.

    Either one sequence with any number of new tokens, or many with one each.

    Args:
        query: `[tokens, heads, head_dim]`, rotated.
        key: `[tokens, kv_heads, head_dim]`, rotated.
        value: As `key`.
        keys: Cache of one layer, `[blocks, block_tokens, kv_heads, head_dim]`; written.
        values: As `keys`.
        slots: Where each new token goes: `block * block_tokens + offset`, int64 `[tokens]`.
        tables: Blocks of each sequence in order, int64 `[sequences, blocks]`.
        lengths: Context of each sequence with its new tokens, int64 `[sequences]`.

    Returns:
        `[tokens, heads, head_dim]`, contiguous.
    """
    result: Tensor = torch.ops.seedrelay.paged_attention.default(
        query, key, value, keys, values, slots, tables, lengths
    )
    return result


def _attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, tables: Tensor, lengths: Tensor,
) -> Tensor:  # fmt: skip
    _store(key, value, keys, values, slots)
    if tables.shape[0] > 1:
        return _decode_many(query, *_contexts(keys, values, tables), lengths)
    context = _context(keys, values, tables, int(lengths))
    return _prefill(query, *context) if query.shape[0] > 1 else _decode_one(query, *context)


def decode_in_graph(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, tables: Tensor, lengths: Tensor,
) -> Tensor:  # fmt: skip
    """Decodes several sequences in calls that a compiler follows; for the rest see the operator."""
    _store(key, value, keys, values, slots)
    # Not `_contexts`: of a flat table the compiler makes a division per few numbers.
    return _decode_many(query, keys[tables].flatten(1, 2), values[tables].flatten(1, 2), lengths)


def _attend_on_device(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, tables: Tensor, lengths: Tensor,
) -> Tensor:  # fmt: skip
    """Decodes without asking the host how long a context is: a CUDA graph could not."""
    _store(key, value, keys, values, slots)
    if query.shape[0] == tables.shape[0]:
        return _decode_many(query, *_contexts(keys, values, tables), lengths)
    return _prefill(query, *_context(keys, values, tables, int(lengths)))


def _store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    keys.flatten(0, 1).index_copy_(0, slots, key)
    values.flatten(0, 1).index_copy_(0, slots, value)


def _context(keys: Tensor, values: Tensor, tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the only sequence, `[length, kv_heads, head_dim]`."""
    table = tables[0, : -(-length // keys.shape[1])]
    return _gather(keys, table)[:length], _gather(values, table)[:length]


def _gather(cache: Tensor, table: Tensor) -> Tensor:
    return cache.index_select(0, table).flatten(0, 1)


def _decode_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The query heads that share a key head are rows of one small matrix product."""
    _, heads, head_dim = query.shape
    grouped = query.view(1, keys.shape[1], -1, head_dim)
    attended = functional.scaled_dot_product_attention(
        grouped, keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    )
    return attended.reshape(1, heads, head_dim).contiguous()


def _contexts(keys: Tensor, values: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values of every sequence, `[sequences, tokens, kv_heads, head_dim]`."""
    flat, sizes = tables.flatten(), (tables.shape[0], -1)
    return (
        torch.unflatten(_gather(keys, flat), 0, sizes),
        torch.unflatten(_gather(values, flat), 0, sizes),
    )


def _decode_many(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    rows, heads, head_dim = query.shape
    reach = torch.arange(keys.shape[1], device=keys.device) < lengths.unsqueeze(1)
    attended = functional.scaled_dot_product_attention(
        query.view(rows, keys.shape[2], -1, head_dim),
        keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=reach[:, None, None, :],
    )  # fmt: skip
    return attended.reshape(rows, heads, head_dim).contiguous()


def _prefill(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    tokens, context = query.shape[0], keys.shape[0]
    mask = None
    if context > tokens:  # earlier context: each token sees it, itself, and no later one
        mask = torch.ones(tokens, context, dtype=torch.bool, device=query.device)
        mask = mask.tril(context - tokens)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask, is_causal=mask is None, enable_gqa=True,
    )  # fmt: skip
    return attended.squeeze(0).transpose(0, 1).contiguous()


def _shape_only(query: Tensor, *_: Tensor) -> Tensor:
    return query.new_empty(query.shape)


_library.impl("paged_attention", _attend, "CPU")  # type: ignore[no-untyped-call]
_library.impl("paged_attention", _attend_on_device, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("seedrelay::paged_attention", _shape_only, lib=_library)
