"""Fills an arena from a checkpoint folder: checks all of it, then reads it once.

folder ─▶ headers ─▶ fit ─▶ reader ─▶ collector ─▶ arena, with digests
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from torch import Tensor

from engine_service.device.arena import Weights
from engine_service.device.checkpoint import open_checkpoint
from engine_service.device.formats.linear import Linear
from engine_service.device.intake import DEFAULTS, Filled, Intake, LoadOptions
from engine_service.device.landing import Digest
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.device.reading import Progress, equal_bytes, read_files
from engine_service.device.sharding import Slice
from relay_service.core.digests import block_digest


def load(
    arena: Weights,
    folder: Path,
    slices: Mapping[str, Slice],
    computed: Mapping[str, Tensor],
    matrices: Iterable[Linear] = (),
    *,
    options: LoadOptions = DEFAULTS,
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
    checkpoint = open_checkpoint(folder).without(options.unread)
    stored = checkpoint.tensors
    intake = Intake(
        arena, checkpoint, slices, matrices, options=options, digest=digest,
        tied_equal=lambda: equal_bytes(stored[HEAD], stored[EMBEDDING]),
    )  # fmt: skip
    with closing(intake):
        read_files(stored, intake.collector, options.bytes_per_second, progress)
        return intake.finish(computed)
