"""Turns rows of a step into the tensors that a forward pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_service.core.step_messages import Row
from engine_service.device.kv_cache import KVCache
from engine_service.errors import InvalidRequest


class Batch(NamedTuple):
    """Inputs of one forward pass, all int64; shapes as in `paged_attention`."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor


def make_batch(rows: Sequence[Row], cache: KVCache, vocab_size: int) -> Batch:
    """Builds the batch of one row with any tokens, or of many rows with one token each.

    It is put together on the host and then copied to the cache's device. Blocks that a row
    begins to write are cleared. Raises `InvalidRequest` for a row
    that leaves the vocabulary, the model's positions or its own blocks.
    """
    for row in rows:
        _check(row, cache, vocab_size)
    lengths = torch.tensor([row.position + len(row.tokens) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row.tokens])
    if len(rows) == 1:
        positions = torch.arange(rows[0].position, rows[0].position + len(rows[0].tokens))
    else:
        positions = lengths - 1
    tables = _tables(rows, cache, int(lengths.max()))
    slots = _slots(tables, positions, cache.block_tokens)
    fresh = slots[positions % cache.block_tokens == 0] // cache.block_tokens
    if len(fresh):
        cache.clear(fresh.to(cache.device))
    fields = (tokens, positions, slots, tables, lengths)
    return Batch(*(field.to(cache.device) for field in fields))


def _tables(rows: Sequence[Row], cache: KVCache, longest: int) -> Tensor:
    """Blocks that a row has but has not begun to write are not read: others wrote them."""
    width = -(-longest // cache.block_tokens)
    tables = []
    for row in rows:
        begun = -(-(row.position + len(row.tokens)) // cache.block_tokens)
        tables.append([*row.blocks[:begun], *[cache.padding_block] * (width - begun)])
    return torch.tensor(tables)


def _slots(tables: Tensor, positions: Tensor, block_tokens: int) -> Tensor:
    columns = positions // block_tokens
    blocks = tables[0, columns] if len(tables) == 1 else tables[torch.arange(len(tables)), columns]
    return blocks * block_tokens + positions % block_tokens


def _check(row: Row, cache: KVCache, vocab_size: int) -> None:
    end = row.position + len(row.tokens)
    if not row.tokens or row.position < 0 or end > cache.max_positions:
        raise InvalidRequest(
            f"positions {row.position}..{end} are not within 0..{cache.max_positions}",
            field="position", found=str(end), expected=str(cache.max_positions),
        )  # fmt: skip
    if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
        raise InvalidRequest(f"a token id is not within 0..{vocab_size - 1}", field="tokens")
    if end > len(row.blocks) * cache.block_tokens:
        raise InvalidRequest(f"{len(row.blocks)} blocks do not cover {end} tokens", field="blocks")
    if min(row.blocks) < 0 or max(row.blocks) >= cache.padding_block:
        raise InvalidRequest("a block is not one of the cache", field="blocks")
