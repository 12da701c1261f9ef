"""Keeps keys and values of all sequences in blocks of equal size."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_service.device.config import ModelConfig
from engine_service.device.torch_dtypes import TORCH_DTYPES
from relay_service.core.dtypes import DType

CPU = torch.device("cpu")
SCRATCH_TOKENS = 32
SCRATCH_SEQUENCES = 2


class KVCache:
    """Paged storage: one key and one value tensor over all layers.

    Behind the blocks that the scheduler hands out lie scratch blocks for the probe
    and the checks at start, so that they never meet a request, and one block that
    stays zero and pads block tables.
    """

    def __init__(
        self, config: ModelConfig, dtype: DType, blocks: int, block_tokens: int,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        per_sequence = -(-SCRATCH_TOKENS // block_tokens)
        self.device = device
        self.block_tokens = block_tokens
        self.padding_block = blocks + per_sequence * SCRATCH_SEQUENCES
        self.scratch = [
            tuple(range(first, first + per_sequence))
            for first in range(blocks, self.padding_block, per_sequence)
        ]
        self.max_positions = config.max_positions
        shape = (
            config.layers, self.padding_block + 1, block_tokens, config.kv_heads, config.head_dim,
        )  # fmt: skip
        self.keys = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=device)
        self.values = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=device)
        self.layers = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @property
    def state(self) -> dict[str, Tensor]:
        """Runtime state by name: what a forward pass may touch that is not weights."""
        return {"kv.keys": self.keys, "kv.values": self.values}

    def clear(self, blocks: Tensor) -> None:
        """Zeroes blocks (int64 `[n]`) before a sequence begins to write them.

        Attention over a batch multiplies what lies behind a sequence's end by zero;
        a NaN that another sequence left there would survive that.
        """
        self.keys.index_fill_(1, blocks, 0)
        self.values.index_fill_(1, blocks, 0)
