"""Finds the decode layer that was compiled ahead of time for exactly this graph.

`seedrelay model compile` makes it (`compiling.py`); nothing here imports torch's compiler. What
was compiled takes its weights as inputs, so it follows the arena like the graph that it
was made from. It holds at least two rows of two blocks: sizes of one are constants to the
compiler.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, fx

from engine_service.device.batch import Batch
from engine_service.device.capture import Graph
from engine_service.device.formats.processor import machine_facts
from engine_service.device.kv_cache import KVCache
from engine_service.errors import CaptureError

LEAST = 2
"""Rows, and blocks per row."""
_VERSION = 2
_OTHERS_MAY_WRITE = 0o022


def place_of(graph: fx.GraphModule, weights: Sequence[Tensor], cache: KVCache) -> Path:
    """Returns where a graph's compiled twin is, or would be: by all that it is made from."""
    keys, values = cache.layers[0]
    kinds = [(list(t.shape[1:]), str(t.dtype)) for t in (keys, values)]
    weight_kinds = [(list(t.shape), str(t.dtype)) for t in weights]
    made_from = (
        _VERSION, graph.code, weight_kinds, kinds, torch.get_num_threads(), machine_facts(),
    )  # fmt: skip
    name = hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]
    return folder() / f"{name}.so"


def operators_of(place: Path) -> Path:
    """Returns where it is written which operators a compiled layer calls."""
    return place.with_suffix(".json")


def digest_of(place: Path) -> Path:
    """Returns where the SHA-256 of a compiled layer is written."""
    return place.with_suffix(".sha256")


def folder() -> Path:
    """Returns the user's folder of compiled layers."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "seedrelay" / "compiled"


def load(place: Path) -> Graph | None:
    """Returns a compiled layer, none where there is none.

    Raises `CaptureError` for one that others may write, since it is code, and for one
    that cannot be loaded.
    """
    if not place.is_file():
        return None
    for path in (place, operators_of(place), digest_of(place), place.parent):
        if not path.exists():
            raise _unloadable(place, f"{path.name} is missing")
        state = path.stat()
        if state.st_uid != os.geteuid() or state.st_mode & _OTHERS_MAY_WRITE:
            raise CaptureError(
                f"{path} is code that others may have written: it must be yours, and writable by "
                "you alone",
                file=str(path), hint="correct owner and mode, or start with --compiled off",
            )  # fmt: skip
    if digest_of(place).read_text() != hashlib.sha256(place.read_bytes()).hexdigest():
        raise _unloadable(place, "it is not what was compiled")
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(place), 1)  # noqa: SLF001 - its wrapper imports the compiler
    except RuntimeError as error:
        raise _unloadable(place, str(error)) from error

    def layer(*inputs: Tensor) -> Tensor:
        hidden: Tensor = runner.run(list(inputs))[0]
        return hidden

    return layer


def _unloadable(place: Path, reason: str) -> CaptureError:
    return CaptureError(
        f"{place} cannot be loaded: {reason}",
        file=str(place), hint="remove it, and compile again",
    )  # fmt: skip


def roomy(batch: Batch, cache: KVCache) -> Batch:
    """Returns a batch of at least `LEAST` rows and blocks; what is added is idle.

    An idle row writes and reads one slot of a scratch block.
    """
    rows, width = batch.tables.shape
    more_rows, more_blocks = max(0, LEAST - rows), max(0, LEAST - width)
    if not more_rows and not more_blocks:
        return batch
    block = cache.scratch[-1][0]
    tables = torch.nn.functional.pad(
        batch.tables, (0, more_blocks, 0, more_rows), value=cache.padding_block
    )
    tables[rows:, 0] = block
    added = (0, 0, block * cache.block_tokens, 1)
    tokens, positions, slots, lengths = (
        torch.nn.functional.pad(field, (0, more_rows), value=value)
        for field, value in zip(
            (batch.tokens, batch.positions, batch.slots, batch.lengths), added, strict=True
        )
    )
    return Batch(tokens, positions, slots, tables, lengths)
