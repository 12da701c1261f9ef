"""Protocol buffers ↔ core records of updates and versions."""

from __future__ import annotations

import math
from typing import TypeVar

from google.protobuf import duration_pb2, timestamp_pb2

from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.core.update_messages import PushedHeader, StagePiece
from engine_service.core.update_request import (
    DiskSource,
    PushSource,
    RankUpdate,
    RelaySource,
    StagedWeights,
    Staging,
    UpdateReport,
    WeightUpdate,
)
from engine_service.core.update_sessions import LEASE_SECONDS, MAX_LEASE_SECONDS, Caller
from engine_service.core.version_history import VersionRecord
from engine_service.errors import InvalidRequest
from engine_service.rpc import convert
from engine_service.rpc.convert_pause import (
    counts_to_proto,
    fallback_from_proto,
    mode_from_proto,
    seconds_from_proto,
)
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2, weights_pb2

T = TypeVar("T")

MAX_VERSION_BYTES = 256
_STAGING: dict[int, Staging] = {
    engine_pb2.STAGING_UNSPECIFIED: Staging.HOST,
    engine_pb2.STAGING_HOST: Staging.HOST,
    engine_pb2.STAGING_LAYERWISE: Staging.LAYERWISE,
}
_PARTIAL: dict[int, bool] = {
    engine_pb2.COMPLETENESS_UNSPECIFIED: False,
    engine_pb2.COMPLETENESS_FULL: False,
    engine_pb2.COMPLETENESS_PARTIAL: True,
}


def update_from_proto(message: engine_pb2.WeightUpdate) -> WeightUpdate:
    """Returns what an update shall do. Raises `InvalidRequest` by field."""
    return WeightUpdate(
        version=checked_version(message.weight_version),
        source=_source(message.source),
        pause=_pause(message),
        base_digest=message.base_digest.lower(),
        expected_digest=message.expected_digest.lower(),
        partial=_known("completeness", message.completeness, _PARTIAL),
        staging=_known("staging", message.staging, _STAGING),
        prompts=tuple(map(_prompt, message.probe)),
        files=dict(message.files),
        narrow=message.allow_narrowing,
        lease_wait_seconds=seconds_from_proto("lease_wait", message.lease_wait)
        if message.HasField("lease_wait")
        else None,
    )


def checked_version(version: str) -> str:
    """Returns what weights can be called. Raises `InvalidRequest`."""
    if not 0 < len(version.encode()) <= MAX_VERSION_BYTES:
        raise InvalidRequest(
            f"a version of 1 to {MAX_VERSION_BYTES} bytes is needed", field="weight_version"
        )
    return version


def caller_from_proto(
    message: engine_pb2.BeginWeightUpdateRequest | engine_pb2.UpdateWeightsRequest, peer: str
) -> Caller:
    """Returns who asks, and how long there is time. Raises `InvalidRequest`."""
    lease = LEASE_SECONDS
    if isinstance(message, engine_pb2.BeginWeightUpdateRequest) and message.HasField("lease"):
        lease = seconds_from_proto("lease", message.lease, MAX_LEASE_SECONDS)
        if not lease:
            raise InvalidRequest("a lease of 0 seconds cannot be", field="lease")
    return Caller(
        operator=message.operator or peer, key=message.idempotency_key, lease_seconds=lease,
        wait_seconds=seconds_from_proto("wait", message.wait),
    )  # fmt: skip


def seconds_to_proto(seconds: float) -> duration_pb2.Duration:
    """Returns a time."""
    fraction, whole = math.modf(seconds)
    return duration_pb2.Duration(seconds=int(whole), nanos=int(fraction * 1e9))


def header_from_proto(message: engine_pb2.PushedTensor) -> PushedHeader:
    """Returns what is said of a tensor that will come."""
    return PushedHeader(message.name, message.dtype, tuple(message.shape), message.digest)


def piece_from_proto(message: engine_pb2.TensorPiece) -> StagePiece:
    """Returns a piece of a tensor."""
    return StagePiece(message.tensor, message.offset, message.data)


def staged_to_proto(staged: StagedWeights) -> engine_pb2.StagedWeights:
    """Returns what is staged."""
    return engine_pb2.StagedWeights(
        ranks=map(_rank_to_proto, staged.ranks), weights_digest=staged.digest,
        bytes_changed=staged.bytes_changed, seconds_staged=staged.seconds, notes=staged.notes,
        path=_path_to_proto(staged),
    )  # fmt: skip


def report_to_proto(report: UpdateReport, state: State) -> engine_pb2.UpdateReport:
    """Returns what an update did."""
    staged, pause = report.staged, report.pause
    return engine_pb2.UpdateReport(
        weight_version=report.version, weights_digest=report.digest, epoch=report.epoch,
        bytes_changed=staged.bytes_changed, seconds_staged=staged.seconds,
        seconds_paused=report.seconds_paused, seconds_drained=pause.seconds,
        requests=counts_to_proto(pause.requests), ranks=map(_rank_to_proto, staged.ranks),
        flushed_blocks=pause.flushed_blocks, cache_kept=report.cache_kept, notes=staged.notes,
        path=_path_to_proto(staged), state=convert.state_to_proto(state),
        readers=report.readers.readers, leases_ended=report.readers.leases_ended,
        seconds_for_readers=report.readers.seconds,
    )  # fmt: skip


def record_to_proto(record: VersionRecord) -> engine_pb2.WeightVersionRecord:
    """Returns weights that served, or that an update failed to bring."""
    nanos = int(record.time * 1e9)
    return engine_pb2.WeightVersionRecord(
        weight_version=record.version, weights_digest=record.digest, epoch=record.epoch,
        time=timestamp_pb2.Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9),
        source=record.source, operator=record.operator, result=record.result,
        reason=record.reason, seconds_staged=record.seconds_staged,
        seconds_paused=record.seconds_paused, bytes_changed=record.bytes_changed,
        pause_mode=f"PAUSE_MODE_{record.pause_mode.upper()}" if record.pause_mode else None,
    )  # fmt: skip


def _source(message: engine_pb2.WeightSource) -> DiskSource | PushSource | RelaySource:
    match message.WhichOneof("kind"):
        case "disk":
            disk = message.disk
            if not disk.folder or disk.rate_limit_bytes_per_second < 0:
                raise InvalidRequest("a folder is needed, and no rate below 0", field="source.disk")
            return DiskSource(
                folder=disk.folder, sha256=dict(disk.sha256),
                bytes_per_second=disk.rate_limit_bytes_per_second,
            )  # fmt: skip
        case "push":
            return PushSource()
        case "relay":
            return RelaySource(convert.options_from_proto(message.relay.options))
    raise InvalidRequest("a source is needed", field="source", expected="disk | push | relay")


def _pause(message: engine_pb2.WeightUpdate) -> PauseRequest:
    has_deadline = message.HasField("pause_deadline")
    return PauseRequest(
        mode=mode_from_proto("pause_mode", message.pause_mode, PauseMode.RETRACT),
        clear_cache=message.clear_cache if message.HasField("clear_cache") else None,
        deadline_seconds=seconds_from_proto("pause_deadline", message.pause_deadline)
        if has_deadline
        else None,
        on_deadline=fallback_from_proto("on_pause_deadline", message.on_pause_deadline),
    )


def _prompt(message: engine_pb2.ProbePrompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not message.prompt_token_ids:
        raise InvalidRequest("a prompt is empty", field="probe.prompt_token_ids")
    return tuple(message.prompt_token_ids), tuple(message.expected_token_ids)


def _rank_to_proto(rank: RankUpdate) -> engine_pb2.RankUpdate:
    return engine_pb2.RankUpdate(
        rank=rank.rank, bytes_changed=rank.bytes_changed, seconds_staged=rank.seconds_staged,
        seconds_copied=rank.seconds_copied, extra_bytes_peak=rank.extra_bytes,
        bytes_read=rank.bytes_read, digest=rank.digest,
        conversions=map(convert.conversion_to_proto, rank.conversions),
    )  # fmt: skip


def _path_to_proto(staged: StagedWeights) -> list[weights_pb2.PathStep]:
    return [convert.step_to_proto(step) for step in staged.path]


def _known(field: str, value: int, meanings: dict[int, T]) -> T:
    if value not in meanings:
        raise InvalidRequest(f"{field} {value} is unknown", field=field, found=str(value))
    return meanings[value]
