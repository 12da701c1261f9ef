"""Protocol buffers ↔ what a check of weights is asked, and what it found."""

from __future__ import annotations

from clients.channel import MESSAGE_BYTES
from engine_service.core.check_messages import FoundWeights
from engine_service.core.check_report import CheckMode, CheckReport
from engine_service.core.comparing import entries
from engine_service.errors import InvalidRequest, ResourceExhausted
from seedrelay.v1 import engine_pb2

MOST_DIFFERENCES = 1000
"""That are told one by one."""
MODES = {
    engine_pb2.CHECK_MODE_UNSPECIFIED: CheckMode.DIGEST,
    engine_pb2.CHECK_MODE_DIGEST: CheckMode.DIGEST,
    engine_pb2.CHECK_MODE_SNAPSHOT: CheckMode.SNAPSHOT,
    engine_pb2.CHECK_MODE_COMPARE: CheckMode.COMPARE,
    engine_pb2.CHECK_MODE_DIFF: CheckMode.DIFF,
}


def check_from_proto(request: engine_pb2.CheckWeightsRequest) -> tuple[CheckMode, str]:
    """Returns the mode, and the instance to compare with. Raises `InvalidRequest`."""
    mode = MODES.get(request.mode)
    if mode is None:
        raise InvalidRequest("there is no such mode", field="mode", found=str(request.mode))
    if (mode is CheckMode.DIFF) != bool(request.against):
        raise InvalidRequest("an instance is named for DIFF, and only then", field="against")
    return mode, request.against


def check_to_proto(
    report: CheckReport, *, list_tensors: bool = False
) -> engine_pb2.CheckWeightsResponse:
    """Returns what a check found. Raises `ResourceExhausted` for tensors that are too many."""
    response = engine_pb2.CheckWeightsResponse(
        equal=report.equal,
        ranks=[_rank_to_proto(one, list_tensors=list_tensors) for one in report.ranks],
        differences=[
            engine_pb2.WeightDifference(
                rank=one.rank, tensor=one.tensor, block=one.block, what=one.what,
                expected=one.expected, found=one.found,
            )
            for one in report.differences[:MOST_DIFFERENCES]
        ],
        difference_count=len(report.differences),
        weight_version=report.weights.version, epoch=report.weights.epoch,
        seconds=report.seconds, seconds_paused=report.seconds_paused, against=report.against,
    )  # fmt: skip
    if response.ByteSize() > MESSAGE_BYTES:
        raise ResourceExhausted(
            f"the tensors do not fit into an answer of {MESSAGE_BYTES} bytes",
            field="list_tensors", hint="check without listing the tensors",
        )  # fmt: skip
    return response


def _rank_to_proto(found: FoundWeights, *, list_tensors: bool) -> engine_pb2.RankCheck:
    manifest = found.manifest
    tensors = zip(entries(manifest), found.tensors, strict=True) if list_tensors else ()
    return engine_pb2.RankCheck(
        rank=manifest.rank, digest=manifest.digest, tensor_count=len(found.tensors),
        bytes_checked=manifest.weight_bytes,
        tensors=[
            engine_pb2.TensorDigest(
                name=entry.name, digest=digest.hex(), dtype=entry.dtype, shape=entry.shape,
                kind=entry.kind, alias=entry.alias,
            )
            for entry, digest in tensors
        ],
    )  # fmt: skip
