import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_STARTING: _ClassVar[InstanceState]
    INSTANCE_STATE_LOADING: _ClassVar[InstanceState]
    INSTANCE_STATE_DUMMY: _ClassVar[InstanceState]
    INSTANCE_STATE_LANDING: _ClassVar[InstanceState]
    INSTANCE_STATE_READY: _ClassVar[InstanceState]
    INSTANCE_STATE_PAUSED: _ClassVar[InstanceState]
    INSTANCE_STATE_UPDATING: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_STOPPED: _ClassVar[InstanceState]
    INSTANCE_STATE_FAILED: _ClassVar[InstanceState]
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_STARTING: InstanceState
INSTANCE_STATE_LOADING: InstanceState
INSTANCE_STATE_DUMMY: InstanceState
INSTANCE_STATE_LANDING: InstanceState
INSTANCE_STATE_READY: InstanceState
INSTANCE_STATE_PAUSED: InstanceState
INSTANCE_STATE_UPDATING: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_STOPPED: InstanceState
INSTANCE_STATE_FAILED: InstanceState

class Format(_message.Message):
    __slots__ = ("facts", "fingerprint")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.RepeatedCompositeFieldContainer[FormatFact]
    fingerprint: str
    def __init__(self, facts: _Optional[_Iterable[_Union[FormatFact, _Mapping]]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class FormatFact(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("tensor_parallel_size", "expert_parallel_size", "redundant_experts", "expert_map")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    REDUNDANT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_MAP_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    expert_parallel_size: int
    redundant_experts: int
    expert_map: str
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., expert_parallel_size: _Optional[int] = ..., redundant_experts: _Optional[int] = ..., expert_map: _Optional[str] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("name", "byte_count", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    byte_count: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., byte_count: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "kind", "dtype", "shape", "strides", "offset", "byte_count", "logical", "alias", "parts", "sealed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    byte_count: int
    logical: str
    alias: str
    parts: _containers.RepeatedCompositeFieldContainer[TensorPart]
    sealed: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., byte_count: _Optional[int] = ..., logical: _Optional[str] = ..., alias: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[TensorPart, _Mapping]]] = ..., sealed: _Optional[str] = ...) -> None: ...

class TensorPart(_message.Message):
    __slots__ = ("logical", "whole_rows", "whole_columns", "first_row", "row_count", "first_column", "column_count")
    LOGICAL_FIELD_NUMBER: _ClassVar[int]
    WHOLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_COLUMN_FIELD_NUMBER: _ClassVar[int]
    COLUMN_COUNT_FIELD_NUMBER: _ClassVar[int]
    logical: str
    whole_rows: int
    whole_columns: int
    first_row: int
    row_count: int
    first_column: int
    column_count: int
    def __init__(self, logical: _Optional[str] = ..., whole_rows: _Optional[int] = ..., whole_columns: _Optional[int] = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., first_column: _Optional[int] = ..., column_count: _Optional[int] = ...) -> None: ...

class WeightUnit(_message.Message):
    __slots__ = ("name", "offset", "byte_count", "tensors", "block_digests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    byte_count: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    block_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., byte_count: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., block_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PullOptions(_message.Message):
    __slots__ = ("source_instance", "transport", "rate_limit_bytes_per_second", "timeout", "weights_digest")
    SOURCE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    source_instance: str
    transport: str
    rate_limit_bytes_per_second: int
    timeout: _duration_pb2.Duration
    weights_digest: str
    def __init__(self, source_instance: _Optional[str] = ..., transport: _Optional[str] = ..., rate_limit_bytes_per_second: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., weights_digest: _Optional[str] = ...) -> None: ...

class PullProgress(_message.Message):
    __slots__ = ("phase", "source_instance", "transport", "bytes_verified", "bytes_total", "note", "transfer")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    phase: str
    source_instance: str
    transport: str
    bytes_verified: int
    bytes_total: int
    note: str
    transfer: str
    def __init__(self, phase: _Optional[str] = ..., source_instance: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_verified: _Optional[int] = ..., bytes_total: _Optional[int] = ..., note: _Optional[str] = ..., transfer: _Optional[str] = ...) -> None: ...

class PathStep(_message.Message):
    __slots__ = ("source_instance", "address", "transport", "bytes_verified", "reason", "recut")
    SOURCE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECUT_FIELD_NUMBER: _ClassVar[int]
    source_instance: str
    address: str
    transport: str
    bytes_verified: int
    reason: str
    recut: str
    def __init__(self, source_instance: _Optional[str] = ..., address: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_verified: _Optional[int] = ..., reason: _Optional[str] = ..., recut: _Optional[str] = ...) -> None: ...

class PullReport(_message.Message):
    __slots__ = ("state", "path", "transport", "bytes_moved", "bytes_reread", "blocks_reused", "weight_version", "weights_digest", "seconds_matching", "seconds_transfer", "seconds_commit", "seconds_probe", "model", "source_weights_digest", "bytes_copied")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_REREAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REUSED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_MATCHING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_COMMIT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PROBE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_COPIED_FIELD_NUMBER: _ClassVar[int]
    state: InstanceState
    path: _containers.RepeatedCompositeFieldContainer[PathStep]
    transport: str
    bytes_moved: int
    bytes_reread: int
    blocks_reused: int
    weight_version: str
    weights_digest: str
    seconds_matching: float
    seconds_transfer: float
    seconds_commit: float
    seconds_probe: float
    model: str
    source_weights_digest: str
    bytes_copied: int
    def __init__(self, state: _Optional[_Union[InstanceState, str]] = ..., path: _Optional[_Iterable[_Union[PathStep, _Mapping]]] = ..., transport: _Optional[str] = ..., bytes_moved: _Optional[int] = ..., bytes_reread: _Optional[int] = ..., blocks_reused: _Optional[int] = ..., weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., seconds_matching: _Optional[float] = ..., seconds_transfer: _Optional[float] = ..., seconds_commit: _Optional[float] = ..., seconds_probe: _Optional[float] = ..., model: _Optional[str] = ..., source_weights_digest: _Optional[str] = ..., bytes_copied: _Optional[int] = ...) -> None: ...
