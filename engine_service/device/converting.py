"""Says how the numbers of a checkpoint change on their way into an arena. Free of torch.

A type that holds every number of another one is wider; any other conversion is lossy, whether
or not the numbers at hand would survive it: that is known before a byte is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from engine_service.core.load_report import Conversion
from engine_service.device.checkpoint import TensorHeader
from engine_service.device.dtypes import SCALES_SUFFIX, stored_dtype
from engine_service.device.formats.layouts import FP8, FP8_UE8M0, Layout
from relay_service.core.dtypes import DType
from relay_service.core.manifest import Manifest, TensorEntry

_WIDER = frozenset({(DType.BF16, DType.F32), (DType.F16, DType.F32)})
_NAMES = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8",
}  # fmt: skip
BLOCKS = "float8 in blocks"
_KEEP_BLOCKS = (FP8.name, FP8_UE8M0.name)


class Change(NamedTuple):
    """What becomes of one checkpoint tensor."""

    tensor: str
    source: str
    """Its type."""
    target: str
    """Type, or weight format, that holds it."""
    lossy: bool
    by_name: bool
    """Whether it follows from a format, of weights or of the checkpoint, that was named."""


def changes(
    manifest: Manifest, headers: Mapping[str, TensorHeader], layouts: Mapping[str, Layout]
) -> Iterator[Change]:
    """Yields what changes, in the order of the arena.

    `layouts` are those of the matrices that a format processes, by name. Float8 blocks that
    a format may keep aren't among what is yielded, nor are tensors of no supported type.
    """
    for entry in (one for unit in manifest.units for one in unit.tensors):
        if entry.logical and not entry.alias and entry.kind != "scale":
            for name in entry.logical.split("+"):
                dtype = stored_dtype(headers[name].dtype) if name in headers else None
                found = dtype and _becomes(
                    entry.dtype, dtype, layouts.get(entry.name),
                    in_blocks=name + SCALES_SUFFIX in headers,
                )  # fmt: skip
                if found:
                    yield Change(name, *found)


def rounded(entry: TensorEntry, layout: Layout) -> Iterator[Change]:
    """Yields what a matrix's tensors are whose blocks a format could not keep after all."""
    if layout.name in _KEEP_BLOCKS:
        for name in entry.logical.split("+"):
            yield Change(name, BLOCKS, f"{layout.name}, rounded anew", lossy=True, by_name=True)


def grouped(found: Iterable[Change]) -> tuple[Conversion, ...]:
    """Counts changes of a kind, each of which names its first tensor."""
    kinds: dict[tuple[str, str, bool], list[str]] = {}
    for one in found:
        kinds.setdefault((one.source, one.target, one.lossy), []).append(one.tensor)
    return tuple(
        Conversion(source, target, lossy, len(names), names[0])
        for (source, target, lossy), names in kinds.items()
    )


def _becomes(
    held: DType, dtype: DType, layout: Layout | None, *, in_blocks: bool
) -> tuple[str, str, bool, bool] | None:
    """Returns all of a change but the tensor; None where numbers stay what they are."""
    source = BLOCKS if in_blocks else _NAMES[dtype]
    if layout and layout.quantised:
        kept = in_blocks and layout.name in _KEEP_BLOCKS
        return None if kept else (source, layout.name, True, True)
    if in_blocks:
        return source, _NAMES[held], True, True
    return None if dtype == held else (source, _NAMES[held], (dtype, held) not in _WIDER, False)
