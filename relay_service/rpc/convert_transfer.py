"""Protocol buffers ↔ what the fleet is told of transfers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from google.protobuf import duration_pb2

from relay_service.core.logs import clean_transfer
from relay_service.core.pull_report import PathStep
from relay_service.core.transfer_state import TransferState, last_steps
from seedrelay.v1 import relay_pb2, weights_pb2

MAX_SECONDS = 1 << 32


def to_proto(state: TransferState) -> relay_pb2.Transfer:
    """Returns how far a transfer is."""
    remaining = state.remaining_seconds
    return relay_pb2.Transfer(
        transfer=state.transfer, instance=state.instance, address=state.address,
        progress=weights_pb2.PullProgress(
            phase=state.phase, source_instance=state.source_instance, transport=state.transport,
            bytes_verified=state.bytes_verified, bytes_total=state.bytes_total,
            note=state.note, transfer=state.transfer,
        ),
        bytes_moved=state.bytes_moved, bytes_reread=state.bytes_reread,
        blocks_verified=state.blocks_verified, blocks_total=state.blocks_total,
        blocks_failed=state.blocks_failed, bytes_per_second=state.bytes_per_second,
        average_bytes_per_second=state.average_bytes_per_second,
        age=_duration(state.age_seconds),
        remaining=None if remaining is None else _duration(remaining),
        path=map(step_to_proto, state.path), outcome=state.outcome,
    )  # fmt: skip


def from_proto(message: relay_pb2.Transfer) -> TransferState:
    """Returns what another relay says of a transfer."""
    progress = message.progress
    return TransferState(
        transfer=clean_transfer(message.transfer), instance=message.instance,
        address=message.address, phase=progress.phase,
        source_instance=progress.source_instance, transport=progress.transport,
        note=progress.note, bytes_verified=progress.bytes_verified,
        bytes_total=progress.bytes_total, bytes_moved=message.bytes_moved,
        bytes_reread=message.bytes_reread, blocks_verified=message.blocks_verified,
        blocks_total=message.blocks_total, blocks_failed=message.blocks_failed,
        bytes_per_second=message.bytes_per_second,
        average_bytes_per_second=message.average_bytes_per_second,
        age_seconds=message.age.seconds + message.age.nanos / 1e9,
        path=last_steps([
            PathStep(s.source_instance, s.address, s.transport, s.bytes_verified, s.reason, s.recut)
            for s in message.path
        ]),
        outcome=message.outcome,
    )  # fmt: skip


def split(
    states: Iterable[TransferState],
) -> tuple[list[relay_pb2.Transfer], list[relay_pb2.Transfer]]:
    """Returns those that run, and those that have ended."""
    running: list[relay_pb2.Transfer] = []
    ended: list[relay_pb2.Transfer] = []
    for state in states:
        (ended if state.outcome else running).append(to_proto(state))
    return running, ended


def step_to_proto(step: PathStep) -> weights_pb2.PathStep:
    """Returns a source that was tried."""
    return weights_pb2.PathStep(
        source_instance=step.source_instance, address=step.address, transport=step.transport,
        bytes_verified=step.bytes_verified, reason=step.reason, recut=step.recut,
    )  # fmt: skip


def _duration(seconds: float) -> duration_pb2.Duration:
    made = duration_pb2.Duration()
    made.FromTimedelta(timedelta(seconds=min(seconds, MAX_SECONDS)))
    return made
