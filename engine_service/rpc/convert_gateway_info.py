"""What an engine is, as the gateway asks for it: model, server, load, tokenizer."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from engine_service.core.instance import Instance
from engine_service.core.tokenizer import read_json
from engine_service.errors import NotReady
from relay_service.core.instance import State

CHUNK_BYTES = 64 << 10
SERVER_TYPE = "seedrelay"
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings of `generation_config.json` that the gateway applies where a caller says nothing."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can state; equal files make equal archives."""


def health_to_proto(instance: Instance) -> vllm_engine_pb2.HealthCheckResponse:
    """Returns whether the instance serves, and what it does otherwise."""
    lifecycle = instance.lifecycle
    reason = f": {lifecycle.reason}" if lifecycle.reason else ""
    return vllm_engine_pb2.HealthCheckResponse(
        healthy=lifecycle.state is State.READY, message=f"{lifecycle.state}{reason}"
    )


def model_info_to_proto(instance: Instance) -> vllm_engine_pb2.GetModelInfoResponse:
    """Returns what the model is. Raises `NotReady` while that isn't known."""
    codec = instance.codec
    if codec is None:
        raise _no_model_yet(instance)
    context = instance.engine.scheduler.max_tokens
    generation = read_json(instance.files, "generation_config.json")
    defaults = {n: generation[n] for n in _DEFAULTS if generation.get(n) is not None}
    architectures = codec.config.get("architectures")
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=instance.identity.model,
        served_model_name=instance.identity.model,
        is_generation=True,
        max_context_length=context,
        max_req_input_len=context - 1,
        vocab_size=codec.vocab_size,
        model_type=str(codec.config.get("model_type", "")),
        architectures=map(str, architectures) if isinstance(architectures, list) else (),
        eos_token_ids=sorted(codec.end_ids),
        pad_token_id=_token(codec.config.get("pad_token_id")),
        bos_token_id=_token(codec.config.get("bos_token_id")),
        default_sampling_params_json=json.dumps(defaults) if defaults else "",
    )


def server_info_to_proto(
    instance: Instance, seconds_up: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    """Returns how the instance serves."""
    scheduler = instance.engine.scheduler
    facts = dict(instance.format.facts) if instance.format else {}
    dtype = facts.get("dtype", "")
    return vllm_engine_pb2.GetServerInfoResponse(
        active_requests=len(scheduler.running) + len(scheduler.waiting),
        is_paused=instance.engine.gate.closed_by is not None,
        uptime_seconds=seconds_up,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=scheduler.limits.kv_block_tokens,
        model_dtype=dtype,
        kv_cache_dtype=dtype,
        max_num_seqs=scheduler.limits.max_running,
        constrained_decoding_start="first_token",
    )


def loads_to_proto(instance: Instance) -> vllm_engine_pb2.GetLoadsResponse:
    """Returns the load of the only data-parallel rank that there is."""
    scheduler = instance.engine.scheduler
    pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    load = vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=len(running),
        num_waiting_reqs=len(waiting),
        num_total_reqs=len(running) + len(waiting),
        num_used_tokens=pool.used * pool.block_tokens,
        max_total_num_tokens=pool.total * pool.block_tokens,
        token_usage=pool.used / pool.total,
        utilization=len(running) / scheduler.limits.max_running,
        max_running_requests=scheduler.limits.max_running,
        num_waiting_uncached_tokens=sum(sequence.pending for sequence in waiting),
    )
    return vllm_engine_pb2.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=version("seedrelay"),
        dp_rank_count=1,
        loads=[load],
    )


def tokenizer_files(instance: Instance) -> Mapping[str, bytes]:
    """Returns the small files of the model. Raises `NotReady` while they aren't known."""
    if instance.codec is None:
        raise _no_model_yet(instance)
    return instance.files


def zip_files(files: Mapping[str, bytes]) -> bytes:
    """Returns files as a zip archive; the same for the same files. Takes a tenth of a second."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def chunks_to_proto(data: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yields an archive in chunks; the last one carries the SHA-256 of the whole."""
    last = (len(data) - 1) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, len(data), CHUNK_BYTES):
        sha256 = hashlib.sha256(data).hexdigest() if start == last else ""
        yield common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=sha256)


def _no_model_yet(instance: Instance) -> NotReady:
    state = instance.lifecycle.state
    return NotReady(
        f"{instance.identity.name} is {state}: it has no model yet",
        field="state", expected="READY", found=str(state),
    )  # fmt: skip


def _token(value: Any) -> int:
    """Returns a token id; the protocol has 0 for none."""
    return value if type(value) is int else 0
