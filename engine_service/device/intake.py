"""One pass of checkpoint tensors into weights: what comes is checked first, then collected.

headers ─▶ fit ─▶ pieces ─▶ collector ─▶ weights, with digests

Whoever brings them: files (`loading`), or somebody who pushes (`pushed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine_service.core.load_report import LoadReport
from engine_service.device.arena import Weights
from engine_service.device.checkpoint import Checkpoint, TensorHeader
from engine_service.device.collector import Collector
from engine_service.device.converting import changes, grouped, rounded
from engine_service.device.dtypes import SCALES_SUFFIX
from engine_service.device.fitting import check_filled, check_fit, listed
from engine_service.device.formats.linear import Linear
from engine_service.device.landing import Digest, Update
from engine_service.device.parts import parts_of
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


DEFAULTS = LoadOptions()


class Filled(NamedTuple):
    """Weights that hold a checkpoint."""

    manifest: Manifest
    """With digests."""
    report: LoadReport


class Intake:
    """A collector of what was found to fit, and what is told of it afterwards."""

    def __init__(
        self, weights: Weights, checkpoint: Checkpoint[TensorHeader], slices: Mapping[str, Slice],
        matrices: Iterable[Linear], *, options: LoadOptions, tied_equal: Callable[[], bool],
        digest: Digest = block_digest, update: Update | None = None,
    ) -> None:  # fmt: skip
        """Checks headers; changes nothing yet.

        The `checkpoint` has only tensors that `options` does not pass over; for the rest see
        `load`, `check_fit` and `Collector`, and for what is raised.
        """
        stored = checkpoint.tensors
        processed = processed_matrices(stored, slices, matrices)
        check_filled(weights.manifest, processed)
        layouts = {name: one.layout for name, one in processed.items()}
        self._found = list(changes(weights.manifest, stored, layouts))
        self._layouts = layouts
        partial = update and update.partial
        entries = (one for unit in weights.manifest.units for one in unit.tensors)
        check_fit(
            stored, {name: piece.whole for name, piece in slices.items()}, self._found,
            misplaced=checkpoint.misplaced, narrow=options.narrow, tied_equal=tied_equal,
            whole=[
                one.logical.split("+") for one in entries if one.name in processed
            ] if partial else None,
        )  # fmt: skip
        if partial:
            slices = {name: piece for name, piece in slices.items() if name in stored}
        self.collector = Collector(
            weights, parts_of(stored, slices), processed, digest=digest, update=update,
            most_bytes_waiting=options.most_bytes_waiting,
        )  # fmt: skip

    def finish(self, computed: Mapping[str, Tensor]) -> Filled:
        """Adds what no checkpoint holds. Raises what `Collector.finish` does."""
        collector, found = self.collector, list(self._found)
        manifest = collector.finish(computed)
        if anew := collector.rounded_anew:
            words = listed([one.name for one in anew])
            _log.warning("not the checkpoint's own float8: %s", words)
        for entry in anew:
            found += rounded(entry, self._layouts[entry.name])
        report = LoadReport(
            bytes_read=collector.bytes_landed, bytes_held=collector.room.bytes_held_most,
            bytes_spilled=collector.room.bytes_spilled, conversions=grouped(found),
        )  # fmt: skip
        return Filled(manifest, report)

    def close(self) -> None:
        """Lets go of what waits."""
        self.collector.room.close()


def processed_matrices(
    headers: Mapping[str, TensorHeader], slices: Mapping[str, Slice], matrices: Iterable[Linear]
) -> dict[str, Linear]:
    """Returns the matrices that a format fills, by each of their arena tensors.

    Where some come in float8 blocks, the plain ones are put together too.
    """
    scaled = any(name + SCALES_SUFFIX in headers for name in slices)
    return {name: one for one in matrices if scaled or not one.layout.streams for name in one.names}
