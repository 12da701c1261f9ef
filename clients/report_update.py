"""Messages of updates and versions → the JSON objects of the command line; see `report`."""

from __future__ import annotations

from typing import Any

from clients import report, report_pause
from seedrelay.v1 import engine_pb2


def update(done: engine_pb2.UpdateReport) -> dict[str, Any]:
    """Returns what an update did."""
    counts = done.requests
    return {
        "state": report.state_name(done.state),
        "weight_version": done.weight_version,
        "weights_digest": done.weights_digest,
        "epoch": done.epoch,
        "bytes_changed": done.bytes_changed,
        "seconds_staged": done.seconds_staged,
        "seconds_paused": done.seconds_paused,
        "seconds_drained": done.seconds_drained,
        "requests": {
            "paused": counts.paused, "aborted": counts.aborted, "retracted": counts.retracted,
            "finished": counts.finished, "waiting": counts.waiting,
        },
        "readers": done.readers,
        "leases_ended": done.leases_ended,
        "seconds_for_readers": done.seconds_for_readers,
        "flushed_blocks": done.flushed_blocks,
        "cache_kept": done.cache_kept,
        "ranks": [
            {
                "rank": r.rank, "bytes_changed": r.bytes_changed, "digest": r.digest,
                "seconds_staged": r.seconds_staged, "seconds_copied": r.seconds_copied,
                "extra_bytes_peak": r.extra_bytes_peak, "bytes_read": r.bytes_read,
                "conversions": [report.conversion(c) for c in r.conversions],
            }
            for r in done.ranks
        ],
        "notes": list(done.notes),
        "path": [report.path_step(s) for s in done.path],
    }  # fmt: skip


def version_record(one: engine_pb2.WeightVersionRecord) -> dict[str, Any]:
    """Returns weights that served, or an update that failed."""
    return {
        "weight_version": one.weight_version, "weights_digest": one.weights_digest,
        "epoch": one.epoch, "time": one.time.ToJsonString(), "source": one.source,
        "operator": one.operator, "result": one.result, "reason": one.reason,
        "seconds_staged": one.seconds_staged, "seconds_paused": one.seconds_paused,
        "pause_mode": report_pause.mode_name(one.pause_mode), "bytes_changed": one.bytes_changed,
    }  # fmt: skip
