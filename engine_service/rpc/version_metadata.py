"""What made an answer, as trailing metadata: for protocols without a field for it."""

from __future__ import annotations

import json

from engine_service.core.answers import Piece

MAX_SPANS_BYTES = 4096
"""Trailing metadata may have 8 KiB in all; beyond this the first spans are left out."""


class VersionMetadata:
    """Collects what all answers to one request say of their weights, and of lost experts."""

    def __init__(self) -> None:
        self._version, self._epoch = "", 0
        self._degraded = False
        self._spans: list[dict[str, object]] = []

    def take(self, piece: Piece) -> None:
        """Notes a piece."""
        self._version, self._epoch = piece.weights.version, piece.weights.epoch
        self._degraded |= piece.degraded
        for span in piece.ending.spans if piece.ending else ():
            weights = span.weights
            self._spans.append(
                {
                    "index": piece.index, "weight_version": weights.version,
                    "epoch": weights.epoch, "start": span.start, "end": span.end,
                }
            )  # fmt: skip

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns version and epoch of the last weights, escaped as in JSON, and all spans.

        Where tokens were made without lost experts, that comes with them.
        """
        spans = self._spans
        while len(text := json.dumps(spans)) > MAX_SPANS_BYTES:
            spans = spans[1:]
        return (
            ("seedrelay-weight-version", json.dumps(self._version)[1:-1]),
            ("seedrelay-weights-epoch", str(self._epoch)),
            ("seedrelay-version-spans", text),
            *[("seedrelay-degraded", "true")] * self._degraded,
        )
