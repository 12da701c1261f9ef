"""Says in the log how a fill begins and ends, once each. Plain Python."""

from __future__ import annotations

import logging
import time

from engine_service.core.ports import FillProgress, FillReport, OnProgress
from relay_service.core.logs import fields

_log = logging.getLogger(__name__)


class FillLog:
    """Watches the progress of one fill for what the last line says."""

    def __init__(self, instance: str, relay: str, on_progress: OnProgress) -> None:
        self._instance = instance
        self._on_progress = on_progress
        self._began = time.monotonic()
        self._last = FillProgress(phase="attaching")
        _log.info("fill started", extra=fields(instance=instance, relay=relay))

    def __call__(self, progress: FillProgress) -> None:
        """Passes progress on."""
        if progress.transfer:
            self._last = progress
        self._on_progress(progress)

    def done(self, report: FillReport) -> None:
        """Says what a fill that made the instance ready has moved, and how long it took."""
        path = "; ".join(f"{s.source_instance} ({s.transport}): {s.reason}" for s in report.path)
        said = self._said(bytes=report.bytes_moved, transport=report.transport, path=path)
        _log.info("fill ended: ready with %s", report.weight_version, extra=fields(**said))

    def failed(self, error: BaseException) -> None:
        """Says why a fill ended early, and how far it was."""
        last = self._last
        said = self._said(bytes=last.bytes_verified, transport=last.transport, path=last.note)
        reason = str(error) or type(error).__name__
        _log.warning("fill ended: %s", reason, extra=fields(**said))

    def _said(self, **values: object) -> dict[str, object]:
        seconds = round(time.monotonic() - self._began, 3)
        known = {"instance": self._instance, "transfer": self._last.transfer, "seconds": seconds}
        return known | values
