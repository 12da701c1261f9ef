"""What a check of weights found → the JSON object of the command line (DESIGN 8)."""

from __future__ import annotations

from typing import Any

from seedrelay.v1 import engine_pb2


def check(found: engine_pb2.CheckWeightsResponse) -> dict[str, Any]:
    """Returns what was found; tensors where they were asked for."""
    return {
        "equal": found.equal,
        "ranks": [_rank(one) for one in found.ranks],
        "differences": [
            {
                "rank": one.rank, "tensor": one.tensor, "block": one.block, "what": one.what,
                "expected": one.expected, "found": one.found,
            }
            for one in found.differences
        ],
        "difference_count": found.difference_count,
        "weight_version": found.weight_version,
        "epoch": found.epoch,
        "against": found.against,
        "seconds": found.seconds,
        "seconds_paused": found.seconds_paused,
    }  # fmt: skip


def verdict(found: engine_pb2.CheckWeightsResponse) -> str:
    """Returns whether the weights are equal, and to what, in words."""
    if not found.against:
        return "remembered"
    return f"{'equal to' if found.equal else 'different from'} {found.against}"


def _rank(found: engine_pb2.RankCheck) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "rank": found.rank,
        "digest": found.digest,
        "tensor_count": found.tensor_count,
        "bytes_checked": found.bytes_checked,
    }
    if found.tensors:
        shown["tensors"] = [
            {
                "name": one.name, "digest": one.digest, "dtype": one.dtype,
                "shape": list(one.shape), "kind": one.kind, "alias": one.alias,
            }
            for one in found.tensors
        ]  # fmt: skip
    return shown
