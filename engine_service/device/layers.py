"""The pieces that a decoder layer is made of, each a function of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from engine_service.device.formats.linear import Linear
from engine_service.device.parallel import Group


class Stage:
    """A part of a model whose weights can be exchanged for tracing.

    A subclass lists its weights in `WEIGHTS` and holds each as an attribute, a matrix that
    has a format as a `Linear`.
    """

    WEIGHTS: ClassVar[tuple[str, ...]] = ()
    TABLES: ClassVar[bool] = False
    """Whether its matrices have a row per token id or position."""
    forward: Callable[..., Any]
    """Computes the stage."""

    def weights(self) -> list[Tensor]:
        """Returns the tensors of all weights, in the order of `WEIGHTS`."""
        return [tensor for held in self.held() for tensor in _tensors(held)]

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the stage computes."""
        return next(held.dtype for held in self.held() if isinstance(held, Tensor))

    def held(self) -> list[Tensor | Linear]:
        """Returns the weights, in the order of `WEIGHTS`."""
        return [getattr(self, name) for name in self.WEIGHTS]

    def bound(self, weights: Sequence[Tensor]) -> Self:
        """Returns a twin of this stage that reads other weights."""
        twin, rest = copy.copy(self), list(weights)
        for name, held in zip(self.WEIGHTS, self.held(), strict=True):
            count = len(_tensors(held))
            mine, rest = rest[:count], rest[count:]
            setattr(twin, name, held.bound(mine) if isinstance(held, Linear) else mine[0])
        return twin


def embed_part(tokens: Tensor, rows: Tensor, group: Group) -> Tensor:
    """Looks tokens up in this rank's rows of the embedding; those of other ranks give zeros.

    Returns `[tokens, hidden_size]`; the sum over all ranks is the whole embedding.
    """
    if group.ranks == 1:
        return functional.embedding(tokens, rows)
    local = tokens - group.rank * rows.shape[0]
    elsewhere = (local < 0) | (local >= rows.shape[0])
    found = functional.embedding(local.masked_fill(elsewhere, 0), rows)
    return found.masked_fill(elsewhere.unsqueeze(1), 0)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises rows by their root mean square, in float32 (arxiv.org/abs/1910.07467).

    `hidden` is `[rows, hidden_size]`, `weight` `[hidden_size]`.
    """
    normed = functional.rms_norm(hidden.float(), (hidden.shape[-1],), None, eps)
    return normed.to(hidden.dtype) * weight


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotary angles (arxiv.org/abs/2104.09864).

    Both are float32 `[positions, head_dim / 2]`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    angles = torch.outer(torch.arange(positions).float(), 1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs `(i, i + head_dim / 2)` of each head.

    `heads` is `[tokens, heads, head_dim]`; `cos` and `sin` are `[tokens, 1, head_dim]`, the
    first half of `sin` negated: exchanging the halves is then all that is left to do.
    """
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def swiglu(gate_up: Tensor) -> Tensor:
    """Gates the second half of each row by the first (arxiv.org/abs/2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def _tensors(held: Tensor | Linear) -> tuple[Tensor, ...]:
    return held.tensors if isinstance(held, Linear) else (held,)
