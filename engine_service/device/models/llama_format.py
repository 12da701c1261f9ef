"""The kernel format of decoders: which tensors an arena holds, and from what.

Query, key and value projections are fused row-wise, and so are gate and up. The
rotary tables are weights like any other, so a target receives them too. Each expert is a
unit of its own, named by layer and logical expert whichever slot it lies in.

Of several ranks each holds its heads (rows of qkv, columns of output), its part of every
feed-forward (rows of gate and up, columns of down; also of every expert) and its part of the
vocabulary; norms, routers and rotary tables are held by all, and so is a bias that is added
to a sum over ranks. The embedding is cut by vocabulary like the head, at
the price of one more all-reduce per pass: a tied head stays the embedding itself, and no
rank holds rows that it doesn't multiply with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from engine_service.device.config import ModelConfig
from engine_service.device.dtypes import SCALES_SUFFIX
from engine_service.device.formats.layouts import PLAIN, Layout
from engine_service.device.models.families import FAMILIES
from engine_service.device.models.layer_format import Held, layer_units
from engine_service.device.sharding import WHOLE, Shard, Slice
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_FORMAT = "llama-fused/1"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def facts(config: ModelConfig, dtype: str, layout: Layout = PLAIN) -> tuple[tuple[str, str], ...]:
    """Returns, in a fixed order, all that decides what the bytes of an arena mean."""
    return (
        ("kernel_format", KERNEL_FORMAT),
        ("dtype", dtype),
        *layout.facts(),
        *_facts("config", config),
    )


def unit_specs(
    config: ModelConfig, dtype: DType, shard: Shard = WHOLE, layout: Layout = PLAIN
) -> list[UnitSpec]:
    """Declares every tensor that a rank's forward pass reads, by unit."""
    layers = [
        unit
        for index in range(config.layers)
        for unit in layer_specs(config, dtype, shard, layout, index)
    ]
    vocabulary = _vocabulary(config, shard)
    embed = _plain("embed", dtype, {EMBEDDING: vocabulary})
    head = _head_unit(config, dtype, vocabulary, layout.of_head)
    return [UnitSpec("embed", (embed,)), *layers, head, _rotary_unit(config)]


def layer_specs(
    config: ModelConfig, dtype: DType, shard: Shard, layout: Layout, index: int
) -> list[UnitSpec]:
    """Declares the tensors of one layer, by unit."""
    return [
        UnitSpec(unit, tuple(spec for one in held for spec in _specs(one, dtype, layout)))
        for unit, held in layer_units(config, shard, index)
    ]


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint must hold, by name."""
    return {name: piece.whole for name, piece in checkpoint_slices(config).items()}


def checkpoint_slices(
    config: ModelConfig, shard: Shard = WHOLE, layout: Layout = PLAIN
) -> dict[str, Slice]:
    """Returns what a rank reads of every tensor that a checkpoint must hold, by name.

    That is what it holds, and where the layout scales rows, the rest of their columns.
    """
    slices = {EMBEDDING: _vocabulary(config, shard)}
    for index in range(config.layers):
        for _unit, held in layer_units(config, shard, index):
            for one in held:
                scaled = layout.scales_rows and _has_format(one)
                for name, piece in one.parts.items():
                    slices[name] = piece.with_whole_rows() if scaled else piece
    slices["model.norm.weight"] = Slice.by_rows((config.hidden_size,))
    if not config.tied:
        slices[HEAD] = slices[EMBEDDING]
    return slices


def unread_by(config: ModelConfig, shard: Shard = WHOLE) -> Callable[[str], bool]:
    """Returns what says of a checkpoint tensor that this rank needn't read it.

    It serves to predict further tokens, which nobody does, or it is another rank's expert.
    """
    extra = FAMILIES[config.architecture].unread_layers
    behind = tuple(f"model.layers.{config.layers + index}." for index in range(extra))
    others = checkpoint_slices(config).keys() - checkpoint_slices(config, shard).keys()
    return lambda name: name.startswith(behind) or name.removesuffix(SCALES_SUFFIX) in others


def computed_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Computes the tensors that no checkpoint holds, by their name in the arena."""
    # Here, so that a layout can be planned before torch is imported.
    from engine_service.device.rotary import rotary_tables

    cos, sin = rotary_tables(config.rope, config.rotary_dim, config.max_positions)
    return {"rotary.cos": cos, "rotary.sin": sin}


def _facts(prefix: str, record: msgspec.Struct) -> Iterator[tuple[str, str]]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, msgspec.Struct):
            yield from _facts(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", str(value)


def _specs(held: Held, dtype: DType, layout: Layout) -> list[TensorSpec]:
    if _has_format(held):
        return layout.specs(held.name, dtype, _parts(held.parts))
    return [_plain(held.name, DType.F32 if held.exact else dtype, held.parts)]


def _has_format(held: Held) -> bool:
    """Returns whether it is a matrix that the layout holds, not a vector or an exact one."""
    return not held.exact and all(len(piece.whole) > 1 for piece in held.parts.values())


def _plain(name: str, dtype: DType, slices: Mapping[str, Slice]) -> TensorSpec:
    """Declares a tensor whose rows are those of checkpoint tensors, as they are."""
    shapes = [piece.shape for piece in slices.values()]
    shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
    return TensorSpec(name, dtype, shape, logical="+".join(slices), cut=Cut(_parts(slices)))


def _parts(slices: Mapping[str, Slice]) -> tuple[Part, ...]:
    return tuple(piece.part(name) for name, piece in slices.items())


def _head_unit(config: ModelConfig, dtype: DType, vocabulary: Slice, layout: Layout) -> UnitSpec:
    """A tied head is the embedding itself where its format keeps a checkpoint's bytes."""
    norm = _plain("norm", dtype, {"model.norm.weight": Slice.by_rows((config.hidden_size,))})
    if config.tied and layout.streams:
        head = [TensorSpec("head", dtype, vocabulary.shape, logical=EMBEDDING, alias="embed")]
    else:
        head = layout.specs("head", dtype, [vocabulary.part(EMBEDDING if config.tied else HEAD)])
    return UnitSpec("head", (norm, *head))


def _rotary_unit(config: ModelConfig) -> UnitSpec:
    table = Slice.by_rows((config.max_positions, config.rotary_dim // 2))
    tensors = (
        TensorSpec(name, DType.F32, table.shape, kind="buffer", cut=Cut((table.part(name),)))
        for name in ("rotary.cos", "rotary.sin")
    )
    return UnitSpec("rotary", tuple(tensors))


def _vocabulary(config: ModelConfig, shard: Shard) -> Slice:
    return Slice.by_rows((config.vocab_size, config.hidden_size), shard)
