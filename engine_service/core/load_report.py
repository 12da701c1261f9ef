"""What filling an arena from a checkpoint did, and how it is said. Plain Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from relay_service.core.logs import fields

_log = logging.getLogger(__name__)


class Conversion(msgspec.Struct, frozen=True):
    """Checkpoint tensors that an arena holds in another type or format than their own."""

    source: str
    target: str
    lossy: bool
    """Whether the target cannot hold every number of the source."""
    tensors: int
    example: str
    """Name of the first one."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did."""

    bytes_read: int
    """Of the checkpoint, as far as this rank needs it."""
    bytes_held: int
    """Most bytes that waited in memory for the rest of their matrices."""
    bytes_spilled: int
    """Most bytes that waited in a file, because more than about a layer came out of order."""
    conversions: tuple[Conversion, ...] = ()


def say_loaded(instance: str, reports: Sequence[LoadReport], seconds: float) -> None:
    """Logs once that all ranks have loaded, and every conversion that one of them made."""
    found = dict.fromkeys(one for report in reports for one in report.conversions)
    words = [
        f"{one.tensors} tensors {one.source} → {one.target}{' (lossy)' if one.lossy else ''}"
        f", first {one.example}"
        for one in found
    ]
    said = fields(
        instance=instance, seconds=round(seconds, 3),
        bytes=sum(report.bytes_read for report in reports),
        bytes_spilled=sum(report.bytes_spilled for report in reports),
    )  # fmt: skip
    _log.info("loaded: %s", "; ".join(words) or "every number as it is", extra=said)
