"""Fills an arena from a checkpoint folder: checks all of it, then reads it once.

folder ─▶ headers ─▶ fit ─▶ reader ─▶ collector ─▶ arena, with digests
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from engine_service.core.load_report import LoadReport
from engine_service.device.arena import Arena
from engine_service.device.checkpoint import TensorHeader, open_checkpoint
from engine_service.device.collector import Collector
from engine_service.device.converting import changes, grouped, rounded
from engine_service.device.dtypes import SCALES_SUFFIX
from engine_service.device.fitting import check_filled, check_fit, listed
from engine_service.device.formats.linear import Linear
from engine_service.device.landing import Digest
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.device.parts import parts_of
from engine_service.device.reading import Progress, equal_bytes, read_files
from engine_service.device.sharding import Slice
from relay_service.core.digests import block_digest
from relay_service.core.manifest import Manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to read a checkpoint."""

    unread: Callable[[str], bool] = lambda _name: False
    """Says of a checkpoint tensor whether it may be there and is not read."""
    narrow: bool = True
    """Whether tensors may lose bits in the arena's type, because it was asked for."""
    bytes_per_second: int = 0
    """Most bytes to read; 0 for no limit."""
    most_bytes_waiting: int | None = None
    """As the collector's."""


class Filled(NamedTuple):
    """An arena that holds a checkpoint."""

    manifest: Manifest
    """With digests."""
    report: LoadReport


def load(
    arena: Arena,
    folder: Path,
    slices: Mapping[str, Slice],
    computed: Mapping[str, Tensor],
    matrices: Iterable[Linear] = (),
    *,
    options: LoadOptions = LoadOptions(),
    progress: Progress = lambda _done, _total: None,
    digest: Digest = block_digest,
) -> Filled:
    """Fills an arena.

    Args:
        arena: Where to; untouched when the checkpoint does not fit.
        folder: A checkpoint folder.
        slices: What to take of every checkpoint tensor that the model needs, by name.
        computed: Contents of the arena's tensors that no checkpoint holds, by name.
        matrices: Of the model on this arena.
        options: How to read it.
        progress: Called with bytes read so far and in all.
        digest: Digests one block.

    Raises:
        CheckpointError: The folder is unsound or isn't what the model needs.
        ArenaError: A tensor holds numbers of a format, and none of `matrices` is there to fill it.
        ResourceExhausted: The disk has no room for what lies out of order.
    """
    checkpoint = open_checkpoint(folder)
    stored = {name: one for name, one in checkpoint.tensors.items() if not options.unread(name)}
    processed = processed_matrices(stored, slices, matrices)
    check_filled(arena.manifest, processed)
    layouts = {name: one.layout for name, one in processed.items()}
    found = list(changes(arena.manifest, stored, layouts))
    check_fit(
        stored, {name: piece.whole for name, piece in slices.items()}, found,
        misplaced=checkpoint.misplaced, narrow=options.narrow,
        tied_equal=lambda: equal_bytes(stored[HEAD], stored[EMBEDDING]),
    )  # fmt: skip
    with Collector(
        arena, parts_of(stored, slices), processed,
        most_bytes_waiting=options.most_bytes_waiting, digest=digest,
    ) as collector:  # fmt: skip
        read_files(stored, collector, options.bytes_per_second, progress)
        manifest = collector.finish(computed)
    if anew := collector.rounded_anew:
        _log.warning("not the checkpoint's own float8: %s", listed([one.name for one in anew]))
    found += [change for entry in anew for change in rounded(entry, layouts[entry.name])]
    report = LoadReport(
        bytes_read=collector.bytes_landed, bytes_held=collector.room.bytes_held_most,
        bytes_spilled=collector.room.bytes_spilled, conversions=grouped(found),
    )  # fmt: skip
    return Filled(manifest, report)


def processed_matrices(
    headers: Mapping[str, TensorHeader], slices: Mapping[str, Slice], matrices: Iterable[Linear]
) -> dict[str, Linear]:
    """Returns the matrices that a format fills, by each of their arena tensors.

    Where some come in float8 blocks, the plain ones are put together too.
    """
    scaled = any(name + SCALES_SUFFIX in headers for name in slices)
    return {name: one for one in matrices if scaled or not one.layout.streams for name in one.names}
