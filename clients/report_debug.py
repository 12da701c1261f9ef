"""What to look at when something is wrong → the JSON object of `seedrelay status --debug`."""

from __future__ import annotations

from typing import Any

from clients import report_check, report_pause, report_update
from seedrelay.v1 import engine_pb2


def debug(status: engine_pb2.DebugStatus) -> dict[str, Any]:
    """Returns it in the order in which one looks for trouble; null for what there is none of."""
    return {
        "pause": report_pause.status(status.pause) if status.HasField("pause") else None,
        "locks": [
            {
                "side": one.side, "purpose": one.purpose, "waits": one.waits,
                "age_seconds": one.age_seconds,
            }
            for one in status.locks
        ],
        "session": _session(status.session) if status.HasField("session") else None,
        "last_check": _last_check(status) if status.HasField("last_check") else None,
        "versions": [report_update.version_record(one) for one in status.versions],
        "memory": [
            {
                "rank": one.rank, "resident_bytes": one.resident_bytes,
                "staged_bytes": one.staged_bytes,
            }
            for one in status.memory
        ],
    }  # fmt: skip


def _session(one: engine_pb2.UpdateSession) -> dict[str, Any]:
    return {
        "session": one.session, "operator": one.operator, "weight_version": one.weight_version,
        "source": one.source, "phase": one.phase, "age_seconds": one.age_seconds,
        "lease_seconds": one.lease_seconds, "waiting": one.waiting,
    }  # fmt: skip


def _last_check(status: engine_pb2.DebugStatus) -> dict[str, Any]:
    time = status.last_check_time.ToJsonString()
    return {"time": time, **report_check.check(status.last_check)}
