"""Floating numbers of 8 bits (e4m3) in blocks of 128 by 128, each with a scale.

The scale of a block takes its largest magnitude to 448, the largest that the type has. It is
a float32 (`fp8`), or the next power of two (`fp8-ue8m0`), whose exponent fits in a byte; the
type of the tensor of scales tells them apart. Blocks count from the matrix's own corner, and
those at its right and lower edges are what is left. A checkpoint's own blocks are kept as they
are where `block_scaled` finds that they fall on these.

torch has no product of such numbers on a CPU: a product turns 128 rows at a time back into
the type of the model, and multiplies those. So it saves memory and transfers, and costs time.

Error: a product of normally distributed numbers is off by 2.7 % (root mean square, as a part
of the products), which is that of three bits of fraction, with either kind of scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine_service.device.formats.bands import BAND_ROWS, bands
from engine_service.device.formats.block_scaled import BlockScaled, Matrix, expanded
from engine_service.device.formats.layouts import BLOCK
from engine_service.device.formats.operators import opaque

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_NAN = 0x7F


def process(weight: Matrix, stored: Sequence[Tensor]) -> None:
    """Rounds a matrix. See `Kernel`."""
    values, scales = stored
    rows, columns = weight.shape
    for block, first in enumerate(range(0, rows, BLOCK)):
        band = weight[first : first + BLOCK].float()
        padded = functional.pad(band, (0, -columns % BLOCK)).view(len(band), -1, BLOCK)
        scale = _scale(padded.abs().amax((0, 2)), scales.dtype)
        rounded = (band / expanded(scale, columns)).clamp_(-_LARGEST, _LARGEST)
        values[first : first + BLOCK].copy_(rounded)
        scales[block].copy_(scale)


def keep(parts: Sequence[BlockScaled], stored: Sequence[Tensor]) -> bool:
    """Writes a checkpoint's own numbers and scales, if this format has them all.

    Of matrices below one another. Returns whether it has: not NaN, and not scales between
    powers of two in `fp8-ue8m0`.
    """
    values, scales = stored
    grid = torch.cat([part.scales for part in parts])
    held = grid.to(scales.dtype)
    if not torch.equal(held.float(), grid) or any(_has_nan(part.values) for part in parts):
        return False
    first = 0
    for part in parts:
        values[first : first + len(part.values)] = part.values
        first += len(part.values)
    scales.copy_(held)
    return True


def forward(hidden: Tensor, *stored: Tensor) -> Tensor:
    """Multiplies. See `Kernel`."""
    return _product(hidden, *stored)


@opaque("fp8_product", stored=2)
def _product(hidden: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    read = _read(values, scales)
    return torch.cat([functional.linear(hidden, band.to(hidden.dtype)) for band in read], 1)


def _read(values: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Yields 128 rows at a time, float32: as much as stays in cache until it is multiplied."""
    factors = expanded(scales.float() * 2.0**8, values.shape[1])
    for block, factor in enumerate(factors):
        yield _halves(values[block * BLOCK : (block + 1) * BLOCK]).float().mul_(factor)


def _halves(values: Tensor) -> Tensor:
    """Returns float16 numbers that are 2^-8 of what is given, exactly.

    Sign, exponent and fraction are moved to where float16 has them, whose exponents count
    from 8 lower. torch's own conversion, one by one, takes four times as long.
    """
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(-0x4080).view(torch.float16)


def _has_nan(values: Tensor) -> bool:
    codes = values.view(torch.uint8)
    return any((codes[band] & 0x7F).eq(_NAN).any() for band in bands(len(codes), BAND_ROWS))


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float32 scales for the largest magnitudes of blocks; NaN for what isn't finite."""
    scale = largest / _LARGEST
    if dtype is torch.float8_e8m0fnu:
        fraction, exponent = torch.frexp(scale)
        exponent = exponent - fraction.eq(0.5).int()  # a power of two is its own
        scale = (exponent + 127).clamp_(min=0).bitwise_left_shift_(23).view(torch.float32)
    smallest = torch.finfo(torch.float32).tiny
    return scale.clamp(min=smallest).where(largest.isfinite(), torch.nan)
