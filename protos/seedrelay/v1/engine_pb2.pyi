import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from seedrelay.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]

class Completeness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPLETENESS_UNSPECIFIED: _ClassVar[Completeness]
    COMPLETENESS_FULL: _ClassVar[Completeness]
    COMPLETENESS_PARTIAL: _ClassVar[Completeness]

class Staging(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGING_UNSPECIFIED: _ClassVar[Staging]
    STAGING_HOST: _ClassVar[Staging]
    STAGING_LAYERWISE: _ClassVar[Staging]

class CheckMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECK_MODE_UNSPECIFIED: _ClassVar[CheckMode]
    CHECK_MODE_DIGEST: _ClassVar[CheckMode]
    CHECK_MODE_SNAPSHOT: _ClassVar[CheckMode]
    CHECK_MODE_COMPARE: _ClassVar[CheckMode]
    CHECK_MODE_DIFF: _ClassVar[CheckMode]

class MembershipState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBERSHIP_STATE_UNSPECIFIED: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_WHOLE: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_DEGRADED: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_ROUTED: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_HELD: _ClassVar[MembershipState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_RETRACT: PauseMode
COMPLETENESS_UNSPECIFIED: Completeness
COMPLETENESS_FULL: Completeness
COMPLETENESS_PARTIAL: Completeness
STAGING_UNSPECIFIED: Staging
STAGING_HOST: Staging
STAGING_LAYERWISE: Staging
CHECK_MODE_UNSPECIFIED: CheckMode
CHECK_MODE_DIGEST: CheckMode
CHECK_MODE_SNAPSHOT: CheckMode
CHECK_MODE_COMPARE: CheckMode
CHECK_MODE_DIFF: CheckMode
MEMBERSHIP_STATE_UNSPECIFIED: MembershipState
MEMBERSHIP_STATE_WHOLE: MembershipState
MEMBERSHIP_STATE_DEGRADED: MembershipState
MEMBERSHIP_STATE_ROUTED: MembershipState
MEMBERSHIP_STATE_HELD: MembershipState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class PauseCounts(_message.Message):
    __slots__ = ("paused", "aborted", "retracted", "finished", "waiting")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    paused: int
    aborted: int
    retracted: int
    finished: int
    waiting: int
    def __init__(self, paused: _Optional[int] = ..., aborted: _Optional[int] = ..., retracted: _Optional[int] = ..., finished: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class PauseGenerationRequest(_message.Message):
    __slots__ = ("mode", "clear_cache", "deadline", "on_deadline", "operator", "drain_delay")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    ON_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DELAY_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    clear_cache: bool
    deadline: _duration_pb2.Duration
    on_deadline: PauseMode
    operator: str
    drain_delay: _duration_pb2.Duration
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., clear_cache: _Optional[bool] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., on_deadline: _Optional[_Union[PauseMode, str]] = ..., operator: _Optional[str] = ..., drain_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PauseGenerationResponse(_message.Message):
    __slots__ = ("requests", "was_paused", "flushed_blocks", "seconds", "state")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    requests: PauseCounts
    was_paused: bool
    flushed_blocks: int
    seconds: float
    state: _weights_pb2.InstanceState
    def __init__(self, requests: _Optional[_Union[PauseCounts, _Mapping]] = ..., was_paused: _Optional[bool] = ..., flushed_blocks: _Optional[int] = ..., seconds: _Optional[float] = ..., state: _Optional[_Union[_weights_pb2.InstanceState, str]] = ...) -> None: ...

class ContinueGenerationRequest(_message.Message):
    __slots__ = ("keep_reserved_memory",)
    KEEP_RESERVED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    keep_reserved_memory: bool
    def __init__(self, keep_reserved_memory: _Optional[bool] = ...) -> None: ...

class ContinueGenerationResponse(_message.Message):
    __slots__ = ("requests", "was_paused", "reserved_bytes_before", "reserved_bytes_after")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_AFTER_FIELD_NUMBER: _ClassVar[int]
    requests: PauseCounts
    was_paused: bool
    reserved_bytes_before: int
    reserved_bytes_after: int
    def __init__(self, requests: _Optional[_Union[PauseCounts, _Mapping]] = ..., was_paused: _Optional[bool] = ..., reserved_bytes_before: _Optional[int] = ..., reserved_bytes_after: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("flushed_blocks", "blocks_in_use")
    FLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    flushed_blocks: int
    blocks_in_use: int
    def __init__(self, flushed_blocks: _Optional[int] = ..., blocks_in_use: _Optional[int] = ...) -> None: ...

class AbortAllRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortAllResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class WeightSource(_message.Message):
    __slots__ = ("disk", "push", "relay")
    DISK_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    disk: DiskSource
    push: PushSource
    relay: RelaySource
    def __init__(self, disk: _Optional[_Union[DiskSource, _Mapping]] = ..., push: _Optional[_Union[PushSource, _Mapping]] = ..., relay: _Optional[_Union[RelaySource, _Mapping]] = ...) -> None: ...

class DiskSource(_message.Message):
    __slots__ = ("folder", "sha256", "rate_limit_bytes_per_second")
    class Sha256Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    folder: str
    sha256: _containers.ScalarMap[str, str]
    rate_limit_bytes_per_second: int
    def __init__(self, folder: _Optional[str] = ..., sha256: _Optional[_Mapping[str, str]] = ..., rate_limit_bytes_per_second: _Optional[int] = ...) -> None: ...

class PushSource(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RelaySource(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _weights_pb2.PullOptions
    def __init__(self, options: _Optional[_Union[_weights_pb2.PullOptions, _Mapping]] = ...) -> None: ...

class ProbePrompt(_message.Message):
    __slots__ = ("prompt_token_ids", "expected_token_ids")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    expected_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., expected_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WeightUpdate(_message.Message):
    __slots__ = ("weight_version", "base_digest", "expected_digest", "source", "completeness", "pause_mode", "pause_deadline", "on_pause_deadline", "clear_cache", "staging", "probe", "files", "allow_narrowing", "lease_wait")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    COMPLETENESS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    ON_PAUSE_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NARROWING_FIELD_NUMBER: _ClassVar[int]
    LEASE_WAIT_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    base_digest: str
    expected_digest: str
    source: WeightSource
    completeness: Completeness
    pause_mode: PauseMode
    pause_deadline: _duration_pb2.Duration
    on_pause_deadline: PauseMode
    clear_cache: bool
    staging: Staging
    probe: _containers.RepeatedCompositeFieldContainer[ProbePrompt]
    files: _containers.ScalarMap[str, bytes]
    allow_narrowing: bool
    lease_wait: _duration_pb2.Duration
    def __init__(self, weight_version: _Optional[str] = ..., base_digest: _Optional[str] = ..., expected_digest: _Optional[str] = ..., source: _Optional[_Union[WeightSource, _Mapping]] = ..., completeness: _Optional[_Union[Completeness, str]] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., pause_deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., on_pause_deadline: _Optional[_Union[PauseMode, str]] = ..., clear_cache: _Optional[bool] = ..., staging: _Optional[_Union[Staging, str]] = ..., probe: _Optional[_Iterable[_Union[ProbePrompt, _Mapping]]] = ..., files: _Optional[_Mapping[str, bytes]] = ..., allow_narrowing: _Optional[bool] = ..., lease_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class BeginWeightUpdateRequest(_message.Message):
    __slots__ = ("update", "idempotency_key", "lease", "wait", "operator")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    update: WeightUpdate
    idempotency_key: str
    lease: _duration_pb2.Duration
    wait: _duration_pb2.Duration
    operator: str
    def __init__(self, update: _Optional[_Union[WeightUpdate, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., operator: _Optional[str] = ...) -> None: ...

class BeginWeightUpdateResponse(_message.Message):
    __slots__ = ("session", "lease", "base_digest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    session: str
    lease: _duration_pb2.Duration
    base_digest: str
    def __init__(self, session: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., base_digest: _Optional[str] = ...) -> None: ...

class RenewWeightUpdateRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class RenewWeightUpdateResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _duration_pb2.Duration
    def __init__(self, lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UpdateProgress(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total", "note", "session")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    phase: str
    bytes_done: int
    bytes_total: int
    note: str
    session: str
    def __init__(self, phase: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., note: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class RankUpdate(_message.Message):
    __slots__ = ("rank", "bytes_changed", "seconds_staged", "seconds_copied", "extra_bytes_peak", "bytes_read", "digest", "conversions")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_STAGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_COPIED_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BYTES_PEAK_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bytes_changed: int
    seconds_staged: float
    seconds_copied: float
    extra_bytes_peak: int
    bytes_read: int
    digest: str
    conversions: _containers.RepeatedCompositeFieldContainer[Conversion]
    def __init__(self, rank: _Optional[int] = ..., bytes_changed: _Optional[int] = ..., seconds_staged: _Optional[float] = ..., seconds_copied: _Optional[float] = ..., extra_bytes_peak: _Optional[int] = ..., bytes_read: _Optional[int] = ..., digest: _Optional[str] = ..., conversions: _Optional[_Iterable[_Union[Conversion, _Mapping]]] = ...) -> None: ...

class StagedWeights(_message.Message):
    __slots__ = ("ranks", "weights_digest", "bytes_changed", "seconds_staged", "notes", "path")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_STAGED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankUpdate]
    weights_digest: str
    bytes_changed: int
    seconds_staged: float
    notes: _containers.RepeatedScalarFieldContainer[str]
    path: _containers.RepeatedCompositeFieldContainer[_weights_pb2.PathStep]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankUpdate, _Mapping]]] = ..., weights_digest: _Optional[str] = ..., bytes_changed: _Optional[int] = ..., seconds_staged: _Optional[float] = ..., notes: _Optional[_Iterable[str]] = ..., path: _Optional[_Iterable[_Union[_weights_pb2.PathStep, _Mapping]]] = ...) -> None: ...

class StageWeightsRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class StageWeightsResponse(_message.Message):
    __slots__ = ("progress", "staged")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    progress: UpdateProgress
    staged: StagedWeights
    def __init__(self, progress: _Optional[_Union[UpdateProgress, _Mapping]] = ..., staged: _Optional[_Union[StagedWeights, _Mapping]] = ...) -> None: ...

class PushedTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class TensorPiece(_message.Message):
    __slots__ = ("tensor", "offset", "data")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    offset: int
    data: bytes
    def __init__(self, tensor: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("session", "tensors")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    session: str
    tensors: _containers.RepeatedCompositeFieldContainer[PushedTensor]
    def __init__(self, session: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[PushedTensor, _Mapping]]] = ...) -> None: ...

class PushWeightsRequest(_message.Message):
    __slots__ = ("header", "piece")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    piece: TensorPiece
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., piece: _Optional[_Union[TensorPiece, _Mapping]] = ...) -> None: ...

class PushWeightsResponse(_message.Message):
    __slots__ = ("staged",)
    STAGED_FIELD_NUMBER: _ClassVar[int]
    staged: StagedWeights
    def __init__(self, staged: _Optional[_Union[StagedWeights, _Mapping]] = ...) -> None: ...

class CommitWeightUpdateRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class UpdateReport(_message.Message):
    __slots__ = ("weight_version", "weights_digest", "epoch", "bytes_changed", "seconds_staged", "seconds_paused", "seconds_drained", "requests", "ranks", "flushed_blocks", "cache_kept", "notes", "path", "state", "readers", "leases_ended", "seconds_for_readers")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_STAGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_KEPT_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FOR_READERS_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    weights_digest: str
    epoch: int
    bytes_changed: int
    seconds_staged: float
    seconds_paused: float
    seconds_drained: float
    requests: PauseCounts
    ranks: _containers.RepeatedCompositeFieldContainer[RankUpdate]
    flushed_blocks: int
    cache_kept: bool
    notes: _containers.RepeatedScalarFieldContainer[str]
    path: _containers.RepeatedCompositeFieldContainer[_weights_pb2.PathStep]
    state: _weights_pb2.InstanceState
    readers: int
    leases_ended: int
    seconds_for_readers: float
    def __init__(self, weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., epoch: _Optional[int] = ..., bytes_changed: _Optional[int] = ..., seconds_staged: _Optional[float] = ..., seconds_paused: _Optional[float] = ..., seconds_drained: _Optional[float] = ..., requests: _Optional[_Union[PauseCounts, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankUpdate, _Mapping]]] = ..., flushed_blocks: _Optional[int] = ..., cache_kept: _Optional[bool] = ..., notes: _Optional[_Iterable[str]] = ..., path: _Optional[_Iterable[_Union[_weights_pb2.PathStep, _Mapping]]] = ..., state: _Optional[_Union[_weights_pb2.InstanceState, str]] = ..., readers: _Optional[int] = ..., leases_ended: _Optional[int] = ..., seconds_for_readers: _Optional[float] = ...) -> None: ...

class CommitWeightUpdateResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: UpdateReport
    def __init__(self, report: _Optional[_Union[UpdateReport, _Mapping]] = ...) -> None: ...

class AbortWeightUpdateRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class AbortWeightUpdateResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("update", "idempotency_key", "wait", "operator")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    update: WeightUpdate
    idempotency_key: str
    wait: _duration_pb2.Duration
    operator: str
    def __init__(self, update: _Optional[_Union[WeightUpdate, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., operator: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: UpdateProgress
    report: UpdateReport
    def __init__(self, progress: _Optional[_Union[UpdateProgress, _Mapping]] = ..., report: _Optional[_Union[UpdateReport, _Mapping]] = ...) -> None: ...

class WeightVersionRecord(_message.Message):
    __slots__ = ("weight_version", "weights_digest", "epoch", "time", "source", "operator", "result", "reason", "seconds_staged", "seconds_paused", "pause_mode", "bytes_changed")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_STAGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    weights_digest: str
    epoch: int
    time: _timestamp_pb2.Timestamp
    source: str
    operator: str
    result: str
    reason: str
    seconds_staged: float
    seconds_paused: float
    pause_mode: PauseMode
    bytes_changed: int
    def __init__(self, weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., epoch: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., source: _Optional[str] = ..., operator: _Optional[str] = ..., result: _Optional[str] = ..., reason: _Optional[str] = ..., seconds_staged: _Optional[float] = ..., seconds_paused: _Optional[float] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., bytes_changed: _Optional[int] = ...) -> None: ...

class ListWeightVersionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWeightVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[WeightVersionRecord]
    def __init__(self, versions: _Optional[_Iterable[_Union[WeightVersionRecord, _Mapping]]] = ...) -> None: ...

class SetWeightVersionRequest(_message.Message):
    __slots__ = ("weight_version", "base_digest")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    base_digest: str
    def __init__(self, weight_version: _Optional[str] = ..., base_digest: _Optional[str] = ...) -> None: ...

class SetWeightVersionResponse(_message.Message):
    __slots__ = ("former_weight_version",)
    FORMER_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    former_weight_version: str
    def __init__(self, former_weight_version: _Optional[str] = ...) -> None: ...

class CheckWeightsRequest(_message.Message):
    __slots__ = ("mode", "against", "list_tensors")
    MODE_FIELD_NUMBER: _ClassVar[int]
    AGAINST_FIELD_NUMBER: _ClassVar[int]
    LIST_TENSORS_FIELD_NUMBER: _ClassVar[int]
    mode: CheckMode
    against: str
    list_tensors: bool
    def __init__(self, mode: _Optional[_Union[CheckMode, str]] = ..., against: _Optional[str] = ..., list_tensors: _Optional[bool] = ...) -> None: ...

class TensorDigest(_message.Message):
    __slots__ = ("name", "digest", "dtype", "shape", "kind", "alias")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    kind: str
    alias: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., kind: _Optional[str] = ..., alias: _Optional[str] = ...) -> None: ...

class RankCheck(_message.Message):
    __slots__ = ("rank", "digest", "tensor_count", "bytes_checked", "tensors")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    digest: str
    tensor_count: int
    bytes_checked: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorDigest]
    def __init__(self, rank: _Optional[int] = ..., digest: _Optional[str] = ..., tensor_count: _Optional[int] = ..., bytes_checked: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorDigest, _Mapping]]] = ...) -> None: ...

class WeightDifference(_message.Message):
    __slots__ = ("rank", "tensor", "block", "what", "expected", "found")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    rank: int
    tensor: str
    block: int
    what: str
    expected: str
    found: str
    def __init__(self, rank: _Optional[int] = ..., tensor: _Optional[str] = ..., block: _Optional[int] = ..., what: _Optional[str] = ..., expected: _Optional[str] = ..., found: _Optional[str] = ...) -> None: ...

class CheckWeightsResponse(_message.Message):
    __slots__ = ("equal", "ranks", "differences", "difference_count", "weight_version", "epoch", "seconds", "seconds_paused", "against")
    EQUAL_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    AGAINST_FIELD_NUMBER: _ClassVar[int]
    equal: bool
    ranks: _containers.RepeatedCompositeFieldContainer[RankCheck]
    differences: _containers.RepeatedCompositeFieldContainer[WeightDifference]
    difference_count: int
    weight_version: str
    epoch: int
    seconds: float
    seconds_paused: float
    against: str
    def __init__(self, equal: _Optional[bool] = ..., ranks: _Optional[_Iterable[_Union[RankCheck, _Mapping]]] = ..., differences: _Optional[_Iterable[_Union[WeightDifference, _Mapping]]] = ..., difference_count: _Optional[int] = ..., weight_version: _Optional[str] = ..., epoch: _Optional[int] = ..., seconds: _Optional[float] = ..., seconds_paused: _Optional[float] = ..., against: _Optional[str] = ...) -> None: ...

class GroupExperts(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, experts: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "groups", "digests")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupExperts]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, layer: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupExperts, _Mapping]]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExpertMap(_message.Message):
    __slots__ = ("expert_count", "placement", "layers")
    EXPERT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    expert_count: int
    placement: _weights_pb2.Placement
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    def __init__(self, expert_count: _Optional[int] = ..., placement: _Optional[_Union[_weights_pb2.Placement, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ...) -> None: ...

class LostExperts(_message.Message):
    __slots__ = ("layer", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "group", "pid")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group: int
    pid: int
    def __init__(self, rank: _Optional[int] = ..., group: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("epoch", "state", "members", "groups_lost", "lost", "reason", "on_rank_loss", "progress")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ON_RANK_LOSS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    state: MembershipState
    members: _containers.RepeatedCompositeFieldContainer[Member]
    groups_lost: int
    lost: _containers.RepeatedCompositeFieldContainer[LostExperts]
    reason: str
    on_rank_loss: str
    progress: ExpertProgress
    def __init__(self, epoch: _Optional[int] = ..., state: _Optional[_Union[MembershipState, str]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., groups_lost: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[LostExperts, _Mapping]]] = ..., reason: _Optional[str] = ..., on_rank_loss: _Optional[str] = ..., progress: _Optional[_Union[ExpertProgress, _Mapping]] = ...) -> None: ...

class ExpertProgress(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total", "source", "note")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    bytes_done: int
    bytes_total: int
    source: str
    note: str
    def __init__(self, phase: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., source: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class PulledUnit(_message.Message):
    __slots__ = ("unit", "part", "bytes", "source")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    unit: str
    part: int
    bytes: int
    source: str
    def __init__(self, unit: _Optional[str] = ..., part: _Optional[int] = ..., bytes: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class ExpertReport(_message.Message):
    __slots__ = ("map", "membership", "epoch", "weights_digest", "pulled", "bytes_pulled", "bytes_copied", "experts_moved", "ranks_started", "seconds_started", "seconds_pulled", "seconds_paused", "seconds")
    MAP_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    BYTES_COPIED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    RANKS_STARTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_STARTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PULLED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    map: ExpertMap
    membership: Membership
    epoch: int
    weights_digest: str
    pulled: _containers.RepeatedCompositeFieldContainer[PulledUnit]
    bytes_pulled: int
    bytes_copied: int
    experts_moved: int
    ranks_started: int
    seconds_started: float
    seconds_pulled: float
    seconds_paused: float
    seconds: float
    def __init__(self, map: _Optional[_Union[ExpertMap, _Mapping]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., epoch: _Optional[int] = ..., weights_digest: _Optional[str] = ..., pulled: _Optional[_Iterable[_Union[PulledUnit, _Mapping]]] = ..., bytes_pulled: _Optional[int] = ..., bytes_copied: _Optional[int] = ..., experts_moved: _Optional[int] = ..., ranks_started: _Optional[int] = ..., seconds_started: _Optional[float] = ..., seconds_pulled: _Optional[float] = ..., seconds_paused: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class RecoverExpertsRequest(_message.Message):
    __slots__ = ("replace", "source")
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    replace: bool
    source: str
    def __init__(self, replace: _Optional[bool] = ..., source: _Optional[str] = ...) -> None: ...

class RecoverExpertsResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: ExpertProgress
    report: ExpertReport
    def __init__(self, progress: _Optional[_Union[ExpertProgress, _Mapping]] = ..., report: _Optional[_Union[ExpertReport, _Mapping]] = ...) -> None: ...

class ScaleExpertsRequest(_message.Message):
    __slots__ = ("expert_parallel_size",)
    EXPERT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    expert_parallel_size: int
    def __init__(self, expert_parallel_size: _Optional[int] = ...) -> None: ...

class ScaleExpertsResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: ExpertProgress
    report: ExpertReport
    def __init__(self, progress: _Optional[_Union[ExpertProgress, _Mapping]] = ..., report: _Optional[_Union[ExpertReport, _Mapping]] = ...) -> None: ...

class GetExpertMapRequest(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ...) -> None: ...

class GetExpertMapResponse(_message.Message):
    __slots__ = ("map", "epoch", "membership", "last_report")
    MAP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    LAST_REPORT_FIELD_NUMBER: _ClassVar[int]
    map: ExpertMap
    epoch: int
    membership: Membership
    last_report: ExpertReport
    def __init__(self, map: _Optional[_Union[ExpertMap, _Mapping]] = ..., epoch: _Optional[int] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., last_report: _Optional[_Union[ExpertReport, _Mapping]] = ...) -> None: ...

class SetExpertMapRequest(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ...) -> None: ...

class SetExpertMapResponse(_message.Message):
    __slots__ = ("map", "epoch", "layers_changed", "experts_moved", "bytes_moved", "seconds_staged", "seconds_paused", "weights_digest")
    MAP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_STAGED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    map: ExpertMap
    epoch: int
    layers_changed: int
    experts_moved: int
    bytes_moved: int
    seconds_staged: float
    seconds_paused: float
    weights_digest: str
    def __init__(self, map: _Optional[_Union[ExpertMap, _Mapping]] = ..., epoch: _Optional[int] = ..., layers_changed: _Optional[int] = ..., experts_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., seconds_staged: _Optional[float] = ..., seconds_paused: _Optional[float] = ..., weights_digest: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "min_tokens", "stop", "include_stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "prompt_logprobs", "n", "structure")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    n: int
    structure: Structure
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., structure: _Optional[_Union[Structure, _Mapping]] = ...) -> None: ...

class Structure(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choice
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request", "text", "chat", "tokens", "sampling", "priority", "stream_interval", "one_version", "weight_version", "refuse_degraded")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    ONE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSE_DEGRADED_FIELD_NUMBER: _ClassVar[int]
    request: str
    text: str
    chat: ChatPrompt
    tokens: TokenPrompt
    sampling: SamplingParams
    priority: int
    stream_interval: int
    one_version: bool
    weight_version: str
    refuse_degraded: bool
    def __init__(self, request: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., stream_interval: _Optional[int] = ..., one_version: _Optional[bool] = ..., weight_version: _Optional[str] = ..., refuse_degraded: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("token", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("weight_version", "epoch", "start", "end")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    epoch: int
    start: int
    end: int
    def __init__(self, weight_version: _Optional[str] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text", "weight_version", "epoch", "finish_reason", "usage", "version_spans", "index", "logprobs", "prompt_logprobs", "stop_token_id", "stop_text", "degraded")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    weight_version: str
    epoch: int
    finish_reason: FinishReason
    usage: Usage
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    stop_token_id: int
    stop_text: str
    degraded: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., weight_version: _Optional[str] = ..., epoch: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., stop_token_id: _Optional[int] = ..., stop_text: _Optional[str] = ..., degraded: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "pid", "arena_bytes", "digest", "arena_address", "page_kind", "sealed", "load")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARENA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGE_KIND_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    arena_bytes: int
    digest: str
    arena_address: int
    page_kind: str
    sealed: bool
    load: LoadReport
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., arena_address: _Optional[int] = ..., page_kind: _Optional[str] = ..., sealed: _Optional[bool] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("bytes_read", "bytes_held", "bytes_spilled", "conversions")
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_HELD_FIELD_NUMBER: _ClassVar[int]
    BYTES_SPILLED_FIELD_NUMBER: _ClassVar[int]
    CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    bytes_read: int
    bytes_held: int
    bytes_spilled: int
    conversions: _containers.RepeatedCompositeFieldContainer[Conversion]
    def __init__(self, bytes_read: _Optional[int] = ..., bytes_held: _Optional[int] = ..., bytes_spilled: _Optional[int] = ..., conversions: _Optional[_Iterable[_Union[Conversion, _Mapping]]] = ...) -> None: ...

class Conversion(_message.Message):
    __slots__ = ("source", "target", "lossy", "tensor_count", "example")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    lossy: bool
    tensor_count: int
    example: str
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., lossy: _Optional[bool] = ..., tensor_count: _Optional[int] = ..., example: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_context_tokens", "max_running", "max_waiting", "kv_block_tokens", "prefill_chunk_tokens")
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_context_tokens: int
    max_running: int
    max_waiting: int
    kv_block_tokens: int
    prefill_chunk_tokens: int
    def __init__(self, max_context_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., max_waiting: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., prefill_chunk_tokens: _Optional[int] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "begin_seconds", "end_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    begin_seconds: float
    end_seconds: float
    def __init__(self, name: _Optional[str] = ..., begin_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("state", "reason", "instance", "generation", "model", "weight_version", "weights_digest", "epoch", "ranks", "running", "waiting", "kv_blocks_used", "kv_blocks_total", "kv_blocks_cached", "limits", "format", "placement", "phases", "relay", "fill", "progress", "waiting_at_gate", "pause", "update", "debug", "membership")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_AT_GATE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    state: _weights_pb2.InstanceState
    reason: str
    instance: str
    generation: str
    model: str
    weight_version: str
    weights_digest: str
    epoch: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_cached: int
    limits: Limits
    format: _weights_pb2.Format
    placement: _weights_pb2.Placement
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    relay: str
    fill: _weights_pb2.PullReport
    progress: _weights_pb2.PullProgress
    waiting_at_gate: int
    pause: PauseStatus
    update: UpdateProgress
    debug: DebugStatus
    membership: Membership
    def __init__(self, state: _Optional[_Union[_weights_pb2.InstanceState, str]] = ..., reason: _Optional[str] = ..., instance: _Optional[str] = ..., generation: _Optional[str] = ..., model: _Optional[str] = ..., weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., epoch: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., format: _Optional[_Union[_weights_pb2.Format, _Mapping]] = ..., placement: _Optional[_Union[_weights_pb2.Placement, _Mapping]] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., relay: _Optional[str] = ..., fill: _Optional[_Union[_weights_pb2.PullReport, _Mapping]] = ..., progress: _Optional[_Union[_weights_pb2.PullProgress, _Mapping]] = ..., waiting_at_gate: _Optional[int] = ..., pause: _Optional[_Union[PauseStatus, _Mapping]] = ..., update: _Optional[_Union[UpdateProgress, _Mapping]] = ..., debug: _Optional[_Union[DebugStatus, _Mapping]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ...) -> None: ...

class PauseStatus(_message.Message):
    __slots__ = ("operator", "mode", "age_seconds")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    mode: PauseMode
    age_seconds: float
    def __init__(self, operator: _Optional[str] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class LockHolder(_message.Message):
    __slots__ = ("side", "purpose", "waits", "age_seconds")
    SIDE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    side: str
    purpose: str
    waits: bool
    age_seconds: float
    def __init__(self, side: _Optional[str] = ..., purpose: _Optional[str] = ..., waits: _Optional[bool] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class UpdateSession(_message.Message):
    __slots__ = ("session", "operator", "weight_version", "source", "phase", "age_seconds", "lease_seconds", "waiting")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    session: str
    operator: str
    weight_version: str
    source: str
    phase: str
    age_seconds: float
    lease_seconds: float
    waiting: int
    def __init__(self, session: _Optional[str] = ..., operator: _Optional[str] = ..., weight_version: _Optional[str] = ..., source: _Optional[str] = ..., phase: _Optional[str] = ..., age_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., waiting: _Optional[int] = ...) -> None: ...

class DebugStatus(_message.Message):
    __slots__ = ("pause", "locks", "session", "last_check", "last_check_time", "versions", "memory")
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_CHECK_FIELD_NUMBER: _ClassVar[int]
    LAST_CHECK_TIME_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    pause: PauseStatus
    locks: _containers.RepeatedCompositeFieldContainer[LockHolder]
    session: UpdateSession
    last_check: CheckWeightsResponse
    last_check_time: _timestamp_pb2.Timestamp
    versions: _containers.RepeatedCompositeFieldContainer[WeightVersionRecord]
    memory: _containers.RepeatedCompositeFieldContainer[RankMemory]
    def __init__(self, pause: _Optional[_Union[PauseStatus, _Mapping]] = ..., locks: _Optional[_Iterable[_Union[LockHolder, _Mapping]]] = ..., session: _Optional[_Union[UpdateSession, _Mapping]] = ..., last_check: _Optional[_Union[CheckWeightsResponse, _Mapping]] = ..., last_check_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[WeightVersionRecord, _Mapping]]] = ..., memory: _Optional[_Iterable[_Union[RankMemory, _Mapping]]] = ...) -> None: ...

class RankMemory(_message.Message):
    __slots__ = ("rank", "resident_bytes", "staged_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    resident_bytes: int
    staged_bytes: int
    def __init__(self, rank: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., staged_bytes: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("debug",)
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    debug: bool
    def __init__(self, debug: _Optional[bool] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class PullWeightsRequest(_message.Message):
    __slots__ = ("relay", "options")
    RELAY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    relay: str
    options: _weights_pb2.PullOptions
    def __init__(self, relay: _Optional[str] = ..., options: _Optional[_Union[_weights_pb2.PullOptions, _Mapping]] = ...) -> None: ...

class PullWeightsResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: _weights_pb2.PullProgress
    report: _weights_pb2.PullReport
    def __init__(self, progress: _Optional[_Union[_weights_pb2.PullProgress, _Mapping]] = ..., report: _Optional[_Union[_weights_pb2.PullReport, _Mapping]] = ...) -> None: ...
