"""Prints what to look at when something is wrong, in the order in which one looks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from textwrap import shorten

from google.protobuf.timestamp_pb2 import Timestamp

from clients import report_check, report_pause
from clients.cli_run import say
from seedrelay.v1 import engine_pb2

LATEST = 5
"""Versions and differences that are printed; JSON has all."""
REASON_COLUMNS = 160
_MIB = 1 << 20
_LABEL_COLUMNS = 10


def debug(status: engine_pb2.DebugStatus) -> None:
    """Prints a table: what is looked at on the left, how it is on the right."""
    for label, lines in (
        ("gate", _gate(status)),
        ("lock", _locks(status)),
        ("update", _session(status)),
        ("check", _check(status)),
        ("versions", _versions(status)),
        ("memory", _memory(status)),
    ):
        for number, line in enumerate(lines):
            say(f"  {label if not number else '':<{_LABEL_COLUMNS}}{line}")


def _gate(status: engine_pb2.DebugStatus) -> Iterator[str]:
    if not status.HasField("pause"):
        yield "open"
        return
    pause = status.pause
    yield (f"closed by {pause.operator} for {pause.age_seconds:.1f} s, "
           f"mode {report_pause.mode_name(pause.mode)}")  # fmt: skip


def _locks(status: engine_pb2.DebugStatus) -> Iterator[str]:
    if not status.locks:
        yield "free"
    for one in status.locks:
        does = "waits" if one.waits else "holds it"
        yield f"{one.purpose} ({one.side}) {does} for {one.age_seconds:.1f} s"


def _session(status: engine_pb2.DebugStatus) -> Iterator[str]:
    if not status.HasField("session"):
        yield "none"
        return
    one = status.session
    yield (f"to {one.weight_version} from {one.source}, by {one.operator}: {one.phase}, "
           f"begun {one.age_seconds:.1f} s ago")  # fmt: skip
    lease = f"ends in {one.lease_seconds:.1f} s" if one.lease_seconds else "does not run"
    yield f"session {one.session}, its lease {lease}, {one.waiting} wait for its end"


def _check(status: engine_pb2.DebugStatus) -> Iterator[str]:
    if not status.HasField("last_check"):
        yield "never"
        return
    found = status.last_check
    verdict = report_check.verdict(found)
    if not found.equal:
        verdict += f" ({found.difference_count} found)"
    yield (f"{verdict}: weights {found.weight_version}, epoch {found.epoch}, "
           f"{_ago(status.last_check_time)}")  # fmt: skip
    for one in found.differences[:LATEST]:
        yield f"rank {one.rank} {one.tensor or '-'}: {one.what}"


def _versions(status: engine_pb2.DebugStatus) -> Iterator[str]:
    if not status.versions:
        yield "none"
    for one in list(status.versions)[: -LATEST - 1 : -1]:
        reason = f": {shorten(one.reason, REASON_COLUMNS)}" if one.reason else ""
        yield (f"{one.weight_version} {one.result} (epoch {one.epoch or '-'}, from {one.source}, "
               f"{_ago(one.time)}){reason}")  # fmt: skip
    if (more := len(status.versions) - LATEST) > 0:
        yield f"and {more} before"


def _memory(status: engine_pb2.DebugStatus) -> Iterator[str]:
    for one in status.memory:
        yield (f"rank {one.rank}: {one.resident_bytes / _MIB:.0f} MiB resident, "
               f"{one.staged_bytes / _MIB:.1f} MiB staged")  # fmt: skip


def _ago(time: Timestamp) -> str:
    age = datetime.now(UTC) - time.ToDatetime(UTC)
    return f"{age.total_seconds():.0f} s ago"
