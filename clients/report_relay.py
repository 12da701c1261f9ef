"""What relays say → the JSON objects of the command line. Field names are fixed (DESIGN 8)."""

from __future__ import annotations

from typing import Any

from clients import report, report_kept
from relay_service.core.instance import Instance
from relay_service.core.match import Match
from relay_service.rpc import convert
from seedrelay.v1 import relay_pb2


def status(message: relay_pb2.GetRelayStatusResponse) -> dict[str, Any]:
    """Returns the status of a relay: its fleet, its transfers and what it keeps."""
    return {
        "service": "relay",
        "address": message.address,
        "generation": message.relay_generation,
        "directory": message.directory,
        "directory_reachable": message.directory_reachable if message.directory else None,
        "directories": [
            {"address": one.address, "reachable": one.reachable} for one in message.directories
        ],
        "leases": message.lease_count,
        "instances": [instance(convert.instance_from_proto(i)) for i in message.instances],
        "transfers": list(map(transfer, message.transfers)),
        "ended_transfers": list(map(transfer, message.ended_transfers)),
        "kept_arenas": [report_kept.arena(one) for one in message.kept_arenas],
    }


def instance(known: Instance) -> dict[str, Any]:
    """Returns an announced instance."""
    coming = known.filling
    return {
        "instance": known.instance,
        "generation": known.generation,
        "model": known.model,
        "state": str(known.state),
        "weight_version": known.weights.version,
        "weights_digest": known.weights.digest,
        "epoch": known.weights.epoch,
        "have_blocks": sum(r.have_blocks for r in known.ranks),
        "blocks": sum(r.blocks for r in known.ranks),
        "address": known.address,
        "load": known.leases,
        "readers": [
            {"instance": r.instance, "transfer": r.transfer, "bytes_served": r.bytes_served}
            for r in known.readers
        ],
        "filling": coming and {
            "model": coming.model,
            "weight_version": coming.version,
            "weights_digest": coming.digest,
            "source_instance": coming.source,
        },
    }  # fmt: skip


def source(match: Match) -> dict[str, Any]:
    """Returns a possible source, and why it isn't one."""
    verdict = {"fits": match.fits, "reason": match.reason, "recut": match.recut}
    return {**instance(match.instance), **verdict}


def transfer(message: relay_pb2.Transfer) -> dict[str, Any]:
    """Returns a transfer, running or ended."""
    left = message.remaining.ToTimedelta().total_seconds()
    return {
        "transfer": message.transfer,
        "instance": message.instance,
        **report.progress(message.progress),
        "address": message.address,
        "bytes_moved": message.bytes_moved,
        "bytes_reread": message.bytes_reread,
        "blocks_verified": message.blocks_verified,
        "blocks": message.blocks_total,
        "blocks_failed": message.blocks_failed,
        "bytes_per_second": message.bytes_per_second,
        "average_bytes_per_second": message.average_bytes_per_second,
        "seconds": message.age.ToTimedelta().total_seconds(),
        "seconds_remaining": left if message.HasField("remaining") else None,
        "path": list(map(report.path_step, message.path)),
        "outcome": message.outcome,
    }
