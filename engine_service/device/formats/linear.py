"""A weight matrix as a forward pass sees it: its arena tensors, and the kernel of its format."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, Self

import torch
from torch import Tensor

from engine_service.device.formats import fp8, int4, int8, packed, plain
from engine_service.device.formats.block_scaled import Matrix, Stacked
from engine_service.device.formats.layouts import Layout
from engine_service.device.formats.onednn import rows_of
from engine_service.device.parallel import ALONE, Group, all_largest
from engine_service.device.torch_dtypes import MANIFEST_DTYPES, TORCH_DTYPES
from engine_service.errors import EngineError


class Kernel(Protocol):
    """What a format does. Implemented by the modules beside this one."""

    def process(self, weight: Matrix, stored: Sequence[Tensor]) -> None:
        """Writes a matrix `[rows, columns]` into its arena tensors, in place."""

    def forward(self, hidden: Tensor, *stored: Tensor) -> Tensor:
        """Multiplies `[tokens, columns]` by the transposed matrix: `[tokens, rows]`.

        Can be traced: reads sizes from the tensors that it is given, when it runs.
        """


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {"plain": plain, "packed": packed, "int8": int8, "fp8": fp8, "fp8-ue8m0": fp8, "int4": int4}
)


def multiply(
    hidden: Tensor, stored: Sequence[Tensor], form: str, largest: Tensor | None = None
) -> Tensor:
    """Multiplies `[tokens, columns]` by the transposed matrix that a format stores.

    `largest` is what `int8.largest` says of the whole rows, where other ranks hold the rest.
    """
    if largest is None:
        return KERNELS[form].forward(hidden, *stored)
    return int8.forward_part(hidden, largest, *stored)


class Linear:
    """A matrix of some format."""

    def __init__(
        self, name: str, layout: Layout, columns: int, tensors: Mapping[str, Tensor],
        across: Group = ALONE,
    ) -> None:  # fmt: skip
        """Finds what the layout stores of matrix `name` among an arena's tensors.

        `across` are the ranks that hold its other columns.
        """
        self._across = across
        self.layout = layout
        self.rename(name)
        self.tensors = tuple(tensors[each] for each in self.names)
        self._columns = columns

    def rename(self, name: str) -> None:
        """Makes it matrix `name`, as what its tensors hold has become."""
        self.names = self.layout.names(name)

    @property
    def across(self) -> str:
        """Group that must know the largest number of a row before it is rounded; or empty."""
        rounds = KERNELS[self.layout.name] is int8 and self._across.ranks > 1
        return self._across.name if rounds else ""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, which its first tensor has too (see `Layout`), and columns of the matrix."""
        return rows_of(self.tensors[0]), self._columns

    @property
    def handed(self) -> tuple[Tensor, ...]:
        """What a compiled layer takes in the place of `tensors`, on the same memory."""
        if KERNELS[self.layout.name] is packed:
            return (packed.described(self.tensors[0], self._columns),)
        return self.tensors

    @property
    def stand_ins(self) -> tuple[Tensor, ...]:
        """New tensors that look to the compiler like what `handed` returns."""
        if KERNELS[self.layout.name] is packed:
            return (self.tensors[0].new_empty(self.shape),)
        return tuple(tensor.clone() for tensor in self.tensors)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns `[tokens, rows]` for `[tokens, columns]`."""
        across = self.across
        largest = all_largest(int8.largest(hidden), across) if across else None
        return multiply(hidden, self.tensors, self.layout.name, largest)

    def bound(self, tensors: Sequence[Tensor]) -> Self:
        """Returns a twin that reads other tensors."""
        twin = copy.copy(self)
        twin.tensors = tuple(tensors)
        return twin

    def fill(self, weight: Matrix, kept: tuple[int, int] | None = None) -> bool:
        """Writes a matrix `[rows, columns]` into the arena, in place.

        Where the numbers of the format depend on whole rows, `weight` has those, and `kept` is
        the first and the number of the columns that the matrix has of them.

        The only way in: a copy into the tensors themselves would round to whole numbers
        without a scale. Returns whether blocks of a checkpoint were kept as they are. Raises
        `EngineError` for another shape, and for numbers that aren't floating ones.
        """
        whole = weight if isinstance(weight, Stacked) else Stacked([weight])
        own, kernel = whole.of_columns(*kept) if kept else whole, KERNELS[self.layout.name]
        if own.shape != self.shape or not all(one.is_floating_point for one in own.dtypes):
            raise EngineError(
                f"{self.names[0]} takes floating numbers {list(self.shape)}, not "
                f"{', '.join(map(str, own.dtypes))} {list(own.shape)}"
            )
        if kernel is fp8 and (blocks := own.blocks()) and fp8.keep(blocks, self.tensors):
            return True
        if kernel is int8:
            int8.process(own, self.tensors, whole if kept else None)
        else:
            kernel.process(own, self.tensors)
        return False

    def holding(self, weight: Tensor) -> list[Tensor]:
        """Returns new tensors of this format that hold `weight`, of any number of rows."""
        declared = self.layout.stored(MANIFEST_DTYPES[weight.dtype], *weight.shape)
        stored = [torch.zeros(one.shape, dtype=TORCH_DTYPES[one.dtype]) for one in declared]
        KERNELS[self.layout.name].process(weight, stored)
        return stored
