"""Where experts lie, and what became of them, as JSON objects; see `report`."""

from __future__ import annotations

from typing import Any

from clients import report_membership
from clients.report import placement
from clients.report_membership import counted
from seedrelay.v1 import engine_pb2


def expert_map(message: engine_pb2.ExpertMap) -> dict[str, Any]:
    """Returns where experts lie: a layer's slots by group of ranks, and digests by expert."""
    return {
        "expert_count": message.expert_count,
        "placement": placement(message.placement),
        "layers": {
            str(one.layer): [list(group.experts) for group in one.groups] for one in message.layers
        },
        "digests": {str(one.layer): [d.hex() for d in one.digests] for one in message.layers},
    }


def found_map(message: engine_pb2.GetExpertMapResponse) -> dict[str, Any]:
    """Returns where experts lie now, and who computes together; a file for `--expert-map`."""
    return {
        **expert_map(message.map),
        "epoch": message.epoch,
        "membership": report_membership.membership(message.membership),
        "last_report": _done(message.last_report) if message.HasField("last_report") else None,
    }


def expert_moves(message: engine_pb2.SetExpertMapResponse) -> dict[str, Any]:
    """Returns what a change of the map did."""
    return {
        **expert_map(message.map),
        "epoch": message.epoch,
        "weights_digest": message.weights_digest,
        "layers_changed": message.layers_changed,
        "experts_moved": message.experts_moved,
        "bytes_moved": message.bytes_moved,
        "seconds_staged": message.seconds_staged,
        "seconds_paused": message.seconds_paused,
    }


def expert_report(message: engine_pb2.ExpertReport) -> dict[str, Any]:
    """Returns what a recovery or a scaling did."""
    return {
        **expert_map(message.map),
        "membership": report_membership.membership(message.membership),
        "epoch": message.epoch,
        "weights_digest": message.weights_digest,
        **_done(message),
    }


def done_line(message: engine_pb2.ExpertReport) -> str:
    """Returns what a recovery or a scaling did, for people."""
    return (
        f"{counted(len(message.pulled), 'unit')} and {counted(message.bytes_pulled, 'byte')} came "
        f"from outside, {counted(message.bytes_copied, 'byte')} from other ranks, "
        f"{counted(message.experts_moved, 'expert')} moved, "
        f"{counted(message.ranks_started, 'rank')} started, paused {message.seconds_paused:.3f} s, "
        f"{message.seconds:.2f} s in all"
    )


def _done(message: engine_pb2.ExpertReport) -> dict[str, Any]:
    return {
        "pulled": [
            {"unit": one.unit, "part": one.part, "bytes": one.bytes, "source": one.source}
            for one in message.pulled
        ],
        "bytes_pulled": message.bytes_pulled,
        "bytes_copied": message.bytes_copied,
        "experts_moved": message.experts_moved,
        "ranks_started": message.ranks_started,
        "seconds_started": message.seconds_started,
        "seconds_pulled": message.seconds_pulled,
        "seconds_paused": message.seconds_paused,
        "seconds": message.seconds,
    }
