"""Reads some experts of a checkpoint folder, and nothing else of it, into other memory.

As a rank's own loading reads them: the same slices, formats and digests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine_service.core.member_messages import ReadUnits, UnitsRead
from engine_service.device.arena import Weights
from engine_service.device.dtypes import SCALES_SUFFIX
from engine_service.device.formats.linear import Linear
from engine_service.device.intake import LoadOptions
from engine_service.device.loading import load
from engine_service.device.models import llama_format
from engine_service.device.models.layer import expert_slot
from engine_service.device.sharding import Shard, rank_config
from relay_service.core.layout import check, lay_out
from relay_service.core.manifest import Manifest, Unit
from relay_service.errors import ManifestError
from relay_service.memory.host import HostArena

if TYPE_CHECKING:
    from engine_service.device.rank import Rank

Progress = Callable[[int, int], None]
_EXPERT = re.compile(r"layer\.(0|[1-9]\d{0,8})\.expert\.(0|[1-9]\d{0,8})")


class Parcel(Weights):
    """Weights in host memory that somebody else owns."""

    def __init__(self, manifest: Manifest, memory: HostArena) -> None:
        """`memory` is writable, and mapped for as long as tensors are looked at."""
        self._memory = memory
        with torch.inference_mode(mode=False):
            data = torch.empty(0, dtype=torch.uint8)
            if memory.data_bytes:
                data = torch.frombuffer(memory.view(0, memory.data_bytes), dtype=torch.uint8)
        super().__init__(manifest, data)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns writable bytes of the data."""
        return self._memory.view(offset, nbytes)

    def build(self, offset: int, nbytes: int) -> memoryview:
        """Returns the block itself."""
        return self._memory.view(offset, nbytes)

    def put(self, offset: int, nbytes: int) -> None:
        """Does nothing: what was built is there."""

    def flush(self) -> None:
        """Does nothing: what was written is there."""


def read_units(rank: Rank, fd: int, command: ReadUnits, progress: Progress) -> UnitsRead:
    """Fills the memory behind `fd`, which stays the caller's.

    Raises `CheckpointError` for a folder that lacks them, before anything is written, and
    `relay_service.errors.ManifestError` for units or memory that are none of this rank's model.
    """
    shard = Shard(rank.shard.rank, rank.shard.ranks)
    manifest = command.manifest.without_digests()
    check(manifest)
    for unit in manifest.units:
        _check_unit(rank, shard, unit)
    memory = HostArena(fd, manifest.data_bytes, writable=True, populate=False)
    try:
        memory.check_header()
        parcel = Parcel(manifest, memory)
        needed = {
            name for unit in manifest.units for t in unit.tensors for name in t.logical.split("+")
        }
        slices = llama_format.checkpoint_slices(rank.config, shard, rank.layout)
        filled = load(
            parcel,
            Path(command.folder),
            {name: piece for name, piece in slices.items() if name in needed},
            {},
            list(_matrices(rank, shard, parcel)),
            options=LoadOptions(
                unread=lambda name: name.removesuffix(SCALES_SUFFIX) not in needed,
                bytes_per_second=command.bytes_per_second,
            ),
            progress=progress,
        )
        return UnitsRead(filled.manifest)
    finally:
        memory.close()


def _matrices(rank: Rank, shard: Shard, parcel: Parcel) -> Iterator[Linear]:
    own = rank_config(rank.config, shard)
    for unit in parcel.manifest.units:
        yield from expert_slot(unit.name, own, parcel.tensors, rank.layout)


def _check_unit(rank: Rank, shard: Shard, unit: Unit) -> None:
    """Refuses what is not an expert just as this rank would hold it."""
    named, config = _EXPERT.fullmatch(unit.name), rank.config
    layer = int(named[1]) if named else -1
    if config.moe is None or not 0 <= layer < config.layers or config.is_dense(layer):
        raise ManifestError(f"unit {unit.name}: it is no expert of the model")
    specs = llama_format.layer_specs(config, rank.dtype, shard, rank.layout, layer)
    laid = [lay_out(0, [spec]).units[0] for spec in specs if spec.name == unit.name]
    if not laid:
        raise ManifestError(f"unit {unit.name}: it is no expert of the model")
    tensors = tuple(
        msgspec.structs.replace(one, offset=one.offset + unit.offset) for one in laid[0].tensors
    )
    if (tensors, laid[0].nbytes) != (unit.tensors, unit.nbytes):
        raise ManifestError(f"unit {unit.name}: this rank would hold it otherwise")
