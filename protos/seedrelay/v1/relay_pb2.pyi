import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from seedrelay.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetAttachmentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAttachmentResponse(_message.Message):
    __slots__ = ("socket_path", "relay_generation", "data_address")
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    RELAY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    relay_generation: str
    data_address: str
    def __init__(self, socket_path: _Optional[str] = ..., relay_generation: _Optional[str] = ..., data_address: _Optional[str] = ...) -> None: ...

class RankBlocks(_message.Message):
    __slots__ = ("rank", "have_blocks", "blocks", "arena_bytes", "digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HAVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    have_blocks: int
    blocks: int
    arena_bytes: int
    digest: str
    def __init__(self, rank: _Optional[int] = ..., have_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("instance", "generation", "model", "state", "format", "placement", "weight_version", "weights_digest", "epoch", "ranks", "artifacts", "address", "lease_count", "filling", "readers")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    generation: str
    model: str
    state: _weights_pb2.InstanceState
    format: _weights_pb2.Format
    placement: _weights_pb2.Placement
    weight_version: str
    weights_digest: str
    epoch: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankBlocks]
    artifacts: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Artifact]
    address: str
    lease_count: int
    filling: Filling
    readers: _containers.RepeatedCompositeFieldContainer[Reader]
    def __init__(self, instance: _Optional[str] = ..., generation: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[_weights_pb2.InstanceState, str]] = ..., format: _Optional[_Union[_weights_pb2.Format, _Mapping]] = ..., placement: _Optional[_Union[_weights_pb2.Placement, _Mapping]] = ..., weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., epoch: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankBlocks, _Mapping]]] = ..., artifacts: _Optional[_Iterable[_Union[_weights_pb2.Artifact, _Mapping]]] = ..., address: _Optional[str] = ..., lease_count: _Optional[int] = ..., filling: _Optional[_Union[Filling, _Mapping]] = ..., readers: _Optional[_Iterable[_Union[Reader, _Mapping]]] = ...) -> None: ...

class Reader(_message.Message):
    __slots__ = ("instance", "transfer", "bytes_served")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    BYTES_SERVED_FIELD_NUMBER: _ClassVar[int]
    instance: str
    transfer: str
    bytes_served: int
    def __init__(self, instance: _Optional[str] = ..., transfer: _Optional[str] = ..., bytes_served: _Optional[int] = ...) -> None: ...

class Filling(_message.Message):
    __slots__ = ("model", "weight_version", "weights_digest", "epoch", "source_instance")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight_version: str
    weights_digest: str
    epoch: int
    source_instance: str
    def __init__(self, model: _Optional[str] = ..., weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., epoch: _Optional[int] = ..., source_instance: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("address", "relay_generation", "instances", "transfers", "start_time", "sequence")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RELAY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    address: str
    relay_generation: str
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    start_time: _timestamp_pb2.Timestamp
    sequence: int
    def __init__(self, address: _Optional[str] = ..., relay_generation: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ("expiry",)
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    expiry: _duration_pb2.Duration
    def __init__(self, expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListSourcesRequest(_message.Message):
    __slots__ = ("instance", "format", "placement", "without_directory")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    instance: str
    format: _weights_pb2.Format
    placement: _weights_pb2.Placement
    without_directory: bool
    def __init__(self, instance: _Optional[str] = ..., format: _Optional[_Union[_weights_pb2.Format, _Mapping]] = ..., placement: _Optional[_Union[_weights_pb2.Placement, _Mapping]] = ..., without_directory: _Optional[bool] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("instance", "fits", "reason", "recut")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECUT_FIELD_NUMBER: _ClassVar[int]
    instance: Instance
    fits: bool
    reason: str
    recut: str
    def __init__(self, instance: _Optional[_Union[Instance, _Mapping]] = ..., fits: _Optional[bool] = ..., reason: _Optional[str] = ..., recut: _Optional[str] = ...) -> None: ...

class ListSourcesResponse(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class GetRelayStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("transfer", "instance", "progress", "address", "bytes_moved", "bytes_reread", "blocks_verified", "blocks_total", "blocks_failed", "bytes_per_second", "average_bytes_per_second", "age", "remaining", "path", "outcome")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_REREAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    transfer: str
    instance: str
    progress: _weights_pb2.PullProgress
    address: str
    bytes_moved: int
    bytes_reread: int
    blocks_verified: int
    blocks_total: int
    blocks_failed: int
    bytes_per_second: int
    average_bytes_per_second: int
    age: _duration_pb2.Duration
    remaining: _duration_pb2.Duration
    path: _containers.RepeatedCompositeFieldContainer[_weights_pb2.PathStep]
    outcome: str
    def __init__(self, transfer: _Optional[str] = ..., instance: _Optional[str] = ..., progress: _Optional[_Union[_weights_pb2.PullProgress, _Mapping]] = ..., address: _Optional[str] = ..., bytes_moved: _Optional[int] = ..., bytes_reread: _Optional[int] = ..., blocks_verified: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_failed: _Optional[int] = ..., bytes_per_second: _Optional[int] = ..., average_bytes_per_second: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., path: _Optional[_Iterable[_Union[_weights_pb2.PathStep, _Mapping]]] = ..., outcome: _Optional[str] = ...) -> None: ...

class Directory(_message.Message):
    __slots__ = ("address", "reachable")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    address: str
    reachable: bool
    def __init__(self, address: _Optional[str] = ..., reachable: _Optional[bool] = ...) -> None: ...

class KeptArena(_message.Message):
    __slots__ = ("instance", "weight_version", "weights_digest", "arena_bytes", "expiry")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    instance: str
    weight_version: str
    weights_digest: str
    arena_bytes: int
    expiry: _duration_pb2.Duration
    def __init__(self, instance: _Optional[str] = ..., weight_version: _Optional[str] = ..., weights_digest: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetRelayStatusResponse(_message.Message):
    __slots__ = ("address", "relay_generation", "directory", "directory_reachable", "instances", "transfers", "lease_count", "ended_transfers", "directories", "kept_arenas")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RELAY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENDED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    KEPT_ARENAS_FIELD_NUMBER: _ClassVar[int]
    address: str
    relay_generation: str
    directory: str
    directory_reachable: bool
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    lease_count: int
    ended_transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    directories: _containers.RepeatedCompositeFieldContainer[Directory]
    kept_arenas: _containers.RepeatedCompositeFieldContainer[KeptArena]
    def __init__(self, address: _Optional[str] = ..., relay_generation: _Optional[str] = ..., directory: _Optional[str] = ..., directory_reachable: _Optional[bool] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., lease_count: _Optional[int] = ..., ended_transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., directories: _Optional[_Iterable[_Union[Directory, _Mapping]]] = ..., kept_arenas: _Optional[_Iterable[_Union[KeptArena, _Mapping]]] = ...) -> None: ...

class WatchTransfersRequest(_message.Message):
    __slots__ = ("own_only", "interval")
    OWN_ONLY_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    own_only: bool
    interval: _duration_pb2.Duration
    def __init__(self, own_only: _Optional[bool] = ..., interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchTransfersResponse(_message.Message):
    __slots__ = ("transfers", "ended_transfers")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    ended_transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., ended_transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ...) -> None: ...

class ForgetArenaRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    def __init__(self, instance: _Optional[str] = ...) -> None: ...

class ForgetArenaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("instance", "generation", "rank", "staged", "epoch")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    instance: str
    generation: str
    rank: int
    staged: bool
    epoch: int
    def __init__(self, instance: _Optional[str] = ..., generation: _Optional[str] = ..., rank: _Optional[int] = ..., staged: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("data_bytes", "units")
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    data_bytes: int
    units: _containers.RepeatedCompositeFieldContainer[_weights_pb2.WeightUnit]
    def __init__(self, data_bytes: _Optional[int] = ..., units: _Optional[_Iterable[_Union[_weights_pb2.WeightUnit, _Mapping]]] = ...) -> None: ...

class GetArtifactRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class GetArtifactResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("instance", "generation", "epoch", "weights_digest", "holder", "transfer", "yields", "follows")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    YIELDS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    generation: str
    epoch: int
    weights_digest: str
    holder: str
    transfer: str
    yields: bool
    follows: bool
    def __init__(self, instance: _Optional[str] = ..., generation: _Optional[str] = ..., epoch: _Optional[int] = ..., weights_digest: _Optional[str] = ..., holder: _Optional[str] = ..., transfer: _Optional[str] = ..., yields: _Optional[bool] = ..., follows: _Optional[bool] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("lease", "expiry", "probe", "epoch", "upstream_instances", "sent_on")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    SENT_ON_FIELD_NUMBER: _ClassVar[int]
    lease: str
    expiry: _duration_pb2.Duration
    probe: bytes
    epoch: int
    upstream_instances: _containers.RepeatedScalarFieldContainer[str]
    sent_on: SentOn
    def __init__(self, lease: _Optional[str] = ..., expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., probe: _Optional[bytes] = ..., epoch: _Optional[int] = ..., upstream_instances: _Optional[_Iterable[str]] = ..., sent_on: _Optional[_Union[SentOn, _Mapping]] = ...) -> None: ...

class SentOn(_message.Message):
    __slots__ = ("next_instance", "manifest_instance", "upstream_instances", "probe")
    NEXT_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    next_instance: str
    manifest_instance: str
    upstream_instances: _containers.RepeatedScalarFieldContainer[str]
    probe: bytes
    def __init__(self, next_instance: _Optional[str] = ..., manifest_instance: _Optional[str] = ..., upstream_instances: _Optional[_Iterable[str]] = ..., probe: _Optional[bytes] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    def __init__(self, lease: _Optional[str] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("expiry",)
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    expiry: _duration_pb2.Duration
    def __init__(self, expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    def __init__(self, lease: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("first_block", "block_count")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    block_count: int
    def __init__(self, first_block: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class GrantReadRequest(_message.Message):
    __slots__ = ("lease", "rank", "runs", "connection_count")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    lease: str
    rank: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    connection_count: int
    def __init__(self, lease: _Optional[str] = ..., rank: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., connection_count: _Optional[int] = ...) -> None: ...

class GrantReadResponse(_message.Message):
    __slots__ = ("data_address", "grants", "expiry")
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    data_address: str
    grants: _containers.RepeatedScalarFieldContainer[bytes]
    expiry: _duration_pb2.Duration
    def __init__(self, data_address: _Optional[str] = ..., grants: _Optional[_Iterable[bytes]] = ..., expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("instance", "options")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    options: _weights_pb2.PullOptions
    def __init__(self, instance: _Optional[str] = ..., options: _Optional[_Union[_weights_pb2.PullOptions, _Mapping]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("progress", "report", "probe")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    progress: _weights_pb2.PullProgress
    report: _weights_pb2.PullReport
    probe: bytes
    def __init__(self, progress: _Optional[_Union[_weights_pb2.PullProgress, _Mapping]] = ..., report: _Optional[_Union[_weights_pb2.PullReport, _Mapping]] = ..., probe: _Optional[bytes] = ...) -> None: ...

class ReturnMappingRequest(_message.Message):
    __slots__ = ("instance", "generation")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    instance: str
    generation: str
    def __init__(self, instance: _Optional[str] = ..., generation: _Optional[str] = ...) -> None: ...

class ReturnMappingResponse(_message.Message):
    __slots__ = ("unmapped_count",)
    UNMAPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    unmapped_count: int
    def __init__(self, unmapped_count: _Optional[int] = ...) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("lease", "rank", "blocks")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    rank: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease: _Optional[str] = ..., rank: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("block", "epoch", "data")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block: int
    epoch: int
    data: bytes
    def __init__(self, block: _Optional[int] = ..., epoch: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
