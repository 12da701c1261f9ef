"""Chooses the shape of a random Llama from what is asked for: numbers, or a size in bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from engine_service.checkpoint.dtypes import ITEM_BYTES
from engine_service.checkpoint.llama import LlamaShape
from engine_service.errors import ConfigError

SMALLEST_VOCAB = 259
"""The tokenizer has 256 bytes and three special tokens."""

_WIDTHS = (8192, 4096, 2048, 1024, 512, 256, 128, 64)
_LAYERS_AT_LEAST = 16
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class ShapeWish:
    """What is asked for; what is None follows from the rest.

    The head dimension is 64 (16 below a width of 256), the heads fill the width, two
    of them share a key head, and the feed-forward part is three times as wide.

    With `size_bytes` the weights get the fewest layers that reach it. The width, unless
    given, is the largest power of two from 64 to 8192 that takes 16 layers or more, so
    the size is met within about a sixteenth.
    """

    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    vocab_size: int = 512
    max_positions: int = 2048
    tied: bool = True
    size_bytes: int | None = None

    def shape(self, dtype: str) -> LlamaShape:
        """Returns the shape for weights of this dtype.

        Raises:
            ConfigError: The numbers do not go together.
        """
        if dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype is {' or '.join(ITEM_BYTES)}, not {dtype}", field="dtype")
        if self.size_bytes is None:
            shape = self._of_width(self.hidden_size or 64, self.layers or 2)
        elif self.layers is not None:
            raise ConfigError("a size decides the number of layers: give one of both", field="size")
        else:
            shape = self._of_size(self.size_bytes // ITEM_BYTES[dtype])
        _check(shape)
        return shape

    def _of_width(self, hidden: int, layers: int) -> LlamaShape:
        """Fills in what follows from the width."""
        head_dim = self.head_dim or (64 if hidden >= 256 else 16)
        heads = self.heads or max(1, hidden // head_dim)
        return LlamaShape(
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=self.kv_heads or (heads if heads % 2 else heads // 2),
            head_dim=head_dim,
            ffn_size=self.ffn_size or 3 * hidden,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            tied=self.tied,
        )

    def _of_size(self, items: int) -> LlamaShape:
        """Chooses width and layers for at least this number of values."""
        widths = (self.hidden_size,) if self.hidden_size else _WIDTHS
        for width in widths:
            shape = self._of_width(width, 1)
            layers = max(1, math.ceil((items - shape.other_items) / shape.layer_items))
            if layers >= _LAYERS_AT_LEAST:
                break
        return replace(shape, layers=layers)


def parse_size(text: str) -> int:
    """Turns `2GiB`, `1.5MiB` or a plain number of bytes into bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i)?B?", text)
    if match is None or not (size := int(float(match[1]) * _UNITS[match[2] or ""])):
        raise ConfigError(f"a size is a number with B, KiB, MiB or GiB, not {text!r}", field="size")
    return size


def _check(shape: LlamaShape) -> None:
    """Refuses shapes that no Llama has."""
    if shape.vocab_size < SMALLEST_VOCAB:
        raise ConfigError(
            f"the vocabulary is {shape.vocab_size}, but the tokenizer needs {SMALLEST_VOCAB}: "
            "256 bytes and three special tokens",
            field="vocab_size",
            expected=f">= {SMALLEST_VOCAB}",
            found=str(shape.vocab_size),
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"{shape.heads} heads cannot share {shape.kv_heads} key heads evenly",
            field="kv_heads",
        )
    if shape.head_dim % 2:
        raise ConfigError(f"the head dimension {shape.head_dim} is odd", field="head_dim")
