"""Messages of pausing → JSON objects of the command line."""

from __future__ import annotations

from typing import Any

from seedrelay.v1 import engine_pb2, weights_pb2


def mode_name(value: engine_pb2.PauseMode) -> str:
    """Returns a pause mode in lower case; empty for none."""
    name = str(engine_pb2.PauseMode.Name(value)).removeprefix("PAUSE_MODE_").lower()
    return name if value else ""


def status(closed: engine_pb2.PauseStatus) -> dict[str, Any]:
    """Returns who closed the gate, and how."""
    return {
        "operator": closed.operator,
        "mode": mode_name(closed.mode),
        "age_seconds": closed.age_seconds,
    }


def counts(done: engine_pb2.PauseCounts) -> dict[str, int]:
    """Returns requests by what a pause did to them."""
    return {
        "paused": done.paused, "aborted": done.aborted, "retracted": done.retracted,
        "finished": done.finished, "waiting": done.waiting,
    }  # fmt: skip


def pause(done: engine_pb2.PauseGenerationResponse) -> dict[str, Any]:
    """Returns what a pause did."""
    return {
        "state": str(weights_pb2.InstanceState.Name(done.state)).removeprefix("INSTANCE_STATE_"),
        "requests": counts(done.requests),
        "was_paused": done.was_paused,
        "flushed_blocks": done.flushed_blocks,
        "seconds": done.seconds,
    }


def resume(done: engine_pb2.ContinueGenerationResponse) -> dict[str, Any]:
    """Returns what going on did."""
    return {
        "requests": counts(done.requests),
        "was_paused": done.was_paused,
        "reserved_bytes_before": done.reserved_bytes_before,
        "reserved_bytes_after": done.reserved_bytes_after,
    }
