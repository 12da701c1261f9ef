"""The pieces that a decoder layer is made of, each a function of tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from engine_service.device.formats.linear import Linear
from engine_service.device.parallel import Group


class Stage:
    """A part of a model whose weights can be exchanged for tracing.

    A subclass lists its weights in `WEIGHTS` and holds each as an attribute: a matrix that
    has a format as a `Linear`, several as nested tuples, one that a model lacks as None.
    Registered state that differs from stage to stage is listed like weights.
    """

    WEIGHTS: ClassVar[tuple[str, ...]] = ()
    TABLES: ClassVar[bool] = False
    """Whether its matrices have a row per token id or position."""
    COMPILES: ClassVar[bool] = True
    """Whether torch's compiler can follow its graph, given operators for the formats."""
    forward: Callable[..., Any]
    """Computes the stage."""

    def weights(self) -> list[Tensor]:
        """Returns the tensors of all weights, in the order of `WEIGHTS`."""
        return [tensor for held in self.held() for tensor in _tensors(held)]

    def handed(self) -> list[Tensor]:
        """Returns what a compiled stage takes in the place of `weights`, on the same memory."""
        return [
            tensor
            for held in self.held()
            for tensor in (held.handed if isinstance(held, Linear) else (held,))
        ]

    def stand_ins(self) -> list[Tensor]:
        """Returns new tensors that look to the compiler like what `handed` returns."""
        return [
            tensor
            for held in self.held()
            for tensor in (held.stand_ins if isinstance(held, Linear) else (held.clone(),))
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the stage computes."""
        return next(held.dtype for held in self.held() if isinstance(held, Tensor))

    def held(self) -> list[Tensor | Linear]:
        """Returns the weights one by one, in the order of `WEIGHTS`."""
        return [leaf for name in self.WEIGHTS for leaf in _leaves(getattr(self, name))]

    def bound(self, weights: Sequence[Tensor]) -> Self:
        """Returns a twin of this stage that reads other weights."""
        twin, rest = copy.copy(self), iter(weights)
        for name in self.WEIGHTS:
            setattr(twin, name, _bound(getattr(self, name), rest))
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


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalises rows by their root mean square, in float32 (arxiv.org/abs/1910.07467).

    `hidden` is `[..., size]`, `weight` `[size]`; `offset` is added to the weights, which
    then multiply in float32 too.
    """
    normed = functional.rms_norm(hidden.float(), (hidden.shape[-1],), None, eps)
    if offset:
        # The sum of weight and offset would be a tensor outside the arena.
        return (normed * weight + normed * offset).to(hidden.dtype)
    return normed.to(hidden.dtype) * weight


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs `(i, i + rotated / 2)` of each head.

    `heads` is `[tokens, heads, rotated]`; `cos` and `sin` are `[tokens, 1, rotated]`, the
    first half of `sin` negated: exchanging the halves is then all that is left to do.
    """
    halves = torch.unflatten(heads, -1, (2, -1))
    exchanged = halves.flip(-2).flatten(-2)
    return heads * cos + exchanged * sin


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Gates the second half of each row by the first (arxiv.org/abs/2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def plus(product: Tensor, bias: Tensor | None) -> Tensor:
    """Adds a bias where there is one."""
    return product if bias is None else product + bias


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    }
)


def _tensors(held: Tensor | Linear) -> tuple[Tensor, ...]:
    return held.tensors if isinstance(held, Linear) else (held,)


def _leaves(held: Any) -> Iterator[Tensor | Linear]:
    if isinstance(held, tuple):
        for each in held:
            yield from _leaves(each)
    elif held is not None:
        yield held


def _bound(held: Any, rest: Iterator[Tensor]) -> Any:
    if isinstance(held, tuple):
        return tuple(_bound(each, rest) for each in held)
    if isinstance(held, Linear):
        return held.bound([next(rest) for _ in held.tensors])
    return None if held is None else next(rest)
