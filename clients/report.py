"""Messages → the JSON objects of the command line. Field names are fixed (DESIGN 8)."""

from __future__ import annotations

from typing import Any

from clients import report_membership, report_pause
from seedrelay.v1 import engine_pb2, weights_pb2


def state_name(value: weights_pb2.InstanceState) -> str:
    """Returns a state without its prefix."""
    return str(weights_pb2.InstanceState.Name(value)).removeprefix("INSTANCE_STATE_")


def finish_name(value: engine_pb2.FinishReason) -> str:
    """Returns a finish reason in lower case."""
    return str(engine_pb2.FinishReason.Name(value)).removeprefix("FINISH_REASON_").lower()


def engine_status(status: engine_pb2.EngineStatus) -> dict[str, Any]:
    """Returns the status of an engine."""
    return {
        "service": "engine",
        "state": state_name(status.state),
        "reason": status.reason,
        "instance": status.instance,
        "generation": status.generation,
        "model": status.model,
        "weight_version": status.weight_version,
        "weights_digest": status.weights_digest,
        "epoch": status.epoch,
        "relay": status.relay,
        "ranks": [
            {
                "rank": r.rank, "pid": r.pid, "arena_bytes": r.arena_bytes, "digest": r.digest,
                "arena_address": r.arena_address, "page_kind": r.page_kind, "sealed": r.sealed,
                "load": load(r.load) if r.HasField("load") else None,
            }
            for r in status.ranks
        ],
        "running": status.running,
        "waiting": status.waiting,
        "waiting_at_gate": status.waiting_at_gate,
        "pause": report_pause.status(status.pause) if status.HasField("pause") else None,
        "kv_blocks_used": status.kv_blocks_used,
        "kv_blocks_total": status.kv_blocks_total,
        "kv_blocks_cached": status.kv_blocks_cached,
        "limits": {
            "max_context_tokens": status.limits.max_context_tokens,
            "max_running": status.limits.max_running,
            "max_waiting": status.limits.max_waiting,
            "kv_block_tokens": status.limits.kv_block_tokens,
            "prefill_chunk_tokens": status.limits.prefill_chunk_tokens,
        },
        "placement": placement(status.placement),
        "membership": report_membership.membership(status.membership),
        "format_fingerprint": status.format.fingerprint,
        "progress": progress(status.progress) if status.HasField("progress") else None,
        "update": update_progress(status.update) if status.HasField("update") else None,
        "fill": pull(status.fill) if status.HasField("fill") else None,
        "phases": [
            {"name": p.name, "begin_seconds": p.begin_seconds, "end_seconds": p.end_seconds}
            for p in status.phases
        ],
    }  # fmt: skip


def placement(message: weights_pb2.Placement) -> dict[str, Any]:
    """Returns where ranks lie."""
    return {
        "tensor_parallel_size": message.tensor_parallel_size,
        "expert_parallel_size": message.expert_parallel_size,
        "redundant_experts": message.redundant_experts,
        "expert_map": message.expert_map,
    }


def load(done: engine_pb2.LoadReport) -> dict[str, Any]:
    """Returns what loading from disk did."""
    return {
        "bytes_read": done.bytes_read,
        "bytes_held": done.bytes_held,
        "bytes_spilled": done.bytes_spilled,
        "conversions": [conversion(c) for c in done.conversions],
    }


def progress(message: weights_pb2.PullProgress) -> dict[str, Any]:
    """Returns how far a pull is."""
    return {
        "phase": message.phase,
        "source_instance": message.source_instance,
        "transport": message.transport,
        "bytes_verified": message.bytes_verified,
        "bytes_total": message.bytes_total,
        "note": message.note,
    }


def pull(report: weights_pb2.PullReport) -> dict[str, Any]:
    """Returns what a pull did."""
    return {
        "state": state_name(report.state),
        "path": [path_step(s) for s in report.path],
        "transport": report.transport,
        "model": report.model,
        "bytes_moved": report.bytes_moved,
        "bytes_reread": report.bytes_reread,
        "bytes_copied": report.bytes_copied,
        "blocks_reused": report.blocks_reused,
        "weight_version": report.weight_version,
        "weights_digest": report.weights_digest,
        "source_weights_digest": report.source_weights_digest,
        "seconds_matching": report.seconds_matching,
        "seconds_transfer": report.seconds_transfer,
        "seconds_commit": report.seconds_commit,
        "seconds_probe": report.seconds_probe,
    }  # fmt: skip


def update_progress(message: engine_pb2.UpdateProgress) -> dict[str, Any]:
    """Returns how far an update is."""
    return {
        "phase": message.phase, "bytes_done": message.bytes_done,
        "bytes_total": message.bytes_total, "note": message.note, "session": message.session,
    }  # fmt: skip


def path_step(step: weights_pb2.PathStep) -> dict[str, Any]:
    """Returns a source that was tried."""
    return {
        "source_instance": step.source_instance, "address": step.address,
        "transport": step.transport, "bytes_verified": step.bytes_verified,
        "reason": step.reason, "recut": step.recut,
    }  # fmt: skip


def conversion(one: engine_pb2.Conversion) -> dict[str, Any]:
    """Returns what became of the type of some tensors."""
    return {
        "source": one.source, "target": one.target, "lossy": one.lossy,
        "tensors": one.tensor_count, "example": one.example,
    }  # fmt: skip


def chunk(message: engine_pb2.GenerateResponse) -> dict[str, Any]:
    """Returns one chunk of an answer; the last one says how it ended."""
    shown: dict[str, Any] = {
        "index": message.index,
        "token_ids": list(message.token_ids),
        "text": message.text,
        "weight_version": message.weight_version,
        "epoch": message.epoch,
    }
    if message.degraded:
        shown["degraded"] = True
    if message.logprobs:
        shown["logprobs"] = [_position(one) for one in message.logprobs]
    if message.finish_reason:
        shown["finish_reason"] = finish_name(message.finish_reason)
        if ended_by := message.WhichOneof("stop"):
            shown[ended_by] = getattr(message, ended_by)
        shown["usage"] = {
            "prompt_tokens": message.usage.prompt_tokens,
            "completion_tokens": message.usage.completion_tokens,
            "cached_tokens": message.usage.cached_tokens,
        }
        shown["version_spans"] = [
            {"weight_version": s.weight_version, "epoch": s.epoch, "start": s.start, "end": s.end}
            for s in message.version_spans
        ]
    return shown


def _position(position: engine_pb2.PositionLogprobs) -> dict[str, Any]:
    return {
        "token_id": position.token.token_id,
        "logprob": position.token.logprob,
        "top": [{"token_id": one.token_id, "logprob": one.logprob} for one in position.top],
    }
