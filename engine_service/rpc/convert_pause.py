"""Protocol buffers ↔ core records of pausing."""

from __future__ import annotations

import asyncio

from google.protobuf import duration_pb2

from engine_service.core.gate import Closing
from engine_service.core.pause_modes import (
    PauseCounts,
    PauseMode,
    PauseReport,
    PauseRequest,
    ResumeReport,
)
from engine_service.errors import InvalidRequest
from seedrelay.v1 import engine_pb2

MAX_TIMEOUT_SECONDS = 315_576_000_000
"""Ten thousand years: the most that a duration may say."""

MODES = {
    PauseMode.ABORT: engine_pb2.PAUSE_MODE_ABORT,
    PauseMode.WAIT: engine_pb2.PAUSE_MODE_WAIT,
    PauseMode.KEEP: engine_pb2.PAUSE_MODE_KEEP,
    PauseMode.RETRACT: engine_pb2.PAUSE_MODE_RETRACT,
}
_FROM_PROTO = {value: mode for mode, value in MODES.items()}


def pause_from_proto(message: engine_pb2.PauseGenerationRequest, caller: str) -> PauseRequest:
    """Returns how to pause; `caller` is who asks unless the message says. Raises `InvalidRequest`.

    Unset, the mode is `KEEP`.
    """
    return PauseRequest(
        mode=mode_from_proto("mode", message.mode, PauseMode.KEEP),
        clear_cache=message.clear_cache if message.HasField("clear_cache") else None,
        deadline_seconds=(
            seconds_from_proto("deadline", message.deadline)
            if message.HasField("deadline") else None
        ),
        on_deadline=fallback_from_proto("on_deadline", message.on_deadline),
        operator=message.operator or caller,
        drain_delay_seconds=seconds_from_proto("drain_delay", message.drain_delay),
    )  # fmt: skip


def mode_from_proto(field: str, value: engine_pb2.PauseMode, unset: PauseMode) -> PauseMode:
    """Returns a mode. Raises `InvalidRequest` for one that this service does not know."""
    if value == engine_pb2.PAUSE_MODE_UNSPECIFIED:
        return unset
    if value not in _FROM_PROTO:
        raise InvalidRequest(
            f"{field} {value} is unknown", field=field,
            expected=" | ".join(PauseMode), found=str(value),
        )  # fmt: skip
    return _FROM_PROTO[value]


def fallback_from_proto(field: str, value: engine_pb2.PauseMode) -> PauseMode | None:
    """Returns the mode for those that still run at a deadline, if any. Raises `InvalidRequest`."""
    if value == engine_pb2.PAUSE_MODE_UNSPECIFIED:
        return None
    if value == engine_pb2.PAUSE_MODE_WAIT:
        raise InvalidRequest(
            f"{field} cannot be wait: the wait is over then", field=field, found="wait",
            expected="abort | keep | retract",
        )  # fmt: skip
    return mode_from_proto(field, value, PauseMode.ABORT)


def seconds_from_proto(
    field: str, message: duration_pb2.Duration, most: float = MAX_TIMEOUT_SECONDS
) -> float:
    """Returns a time in seconds, 0 where it is unset. Raises `InvalidRequest`."""
    seconds = float(message.seconds) + message.nanos / 1e9
    if not 0 <= seconds <= most:
        raise InvalidRequest(
            f"{field} is out of range", field=field, expected=f"0 to {most:g} s",
            found=f"{seconds:g} s",
        )  # fmt: skip
    return seconds


def counts_to_proto(counts: PauseCounts) -> engine_pb2.PauseCounts:
    """Returns requests by what a pause did to them."""
    return engine_pb2.PauseCounts(
        paused=counts.paused, aborted=counts.aborted, retracted=counts.retracted,
        finished=counts.finished, waiting=counts.waiting,
    )  # fmt: skip


def pause_to_proto(report: PauseReport, state: str) -> engine_pb2.PauseGenerationResponse:
    """Returns what a pause did; `state` is the name of an enum value."""
    return engine_pb2.PauseGenerationResponse(
        requests=counts_to_proto(report.requests), was_paused=report.was_paused,
        flushed_blocks=report.flushed_blocks, seconds=report.seconds, state=state,
    )  # fmt: skip


def resume_to_proto(report: ResumeReport) -> engine_pb2.ContinueGenerationResponse:
    """Returns what going on did."""
    return engine_pb2.ContinueGenerationResponse(
        requests=counts_to_proto(report.requests), was_paused=report.was_paused,
        reserved_bytes_before=report.reserved_bytes_before,
        reserved_bytes_after=report.reserved_bytes_after,
    )  # fmt: skip


def closing_to_proto(closing: Closing) -> engine_pb2.PauseStatus:
    """Returns who closed the gate, and how."""
    return engine_pb2.PauseStatus(
        operator=closing.operator, mode=MODES[PauseMode(closing.mode)],
        age_seconds=asyncio.get_running_loop().time() - closing.since,
    )  # fmt: skip
