"""Protocol buffers ↔ core records of the engine: its state, and how it is filled."""

from __future__ import annotations

from google.protobuf import duration_pb2

from engine_service.core.instance import Instance
from engine_service.core.load_report import Conversion, LoadReport
from engine_service.core.ports import FillProgress, FillReport
from engine_service.core.update_request import UpdateProgress
from engine_service.errors import InvalidRequest
from engine_service.rpc.convert_membership import membership_to_proto
from engine_service.rpc.convert_pause import MAX_TIMEOUT_SECONDS, closing_to_proto
from relay_service.core.format import Placement
from relay_service.core.instance import State
from relay_service.core.logs import clean_transfer
from relay_service.core.manifest import weights_digest
from relay_service.core.pull_report import PathStep, PullOptions
from relay_service.memory.host import is_sealed
from seedrelay.v1 import engine_pb2, weights_pb2


def state_to_proto(state: State) -> str:
    """Returns the name of the state's enum value; messages take it as it is."""
    return f"INSTANCE_STATE_{state}"


def status_to_proto(instance: Instance) -> engine_pb2.EngineStatus:
    """Returns the state of an instance, its weights and its load."""
    scheduler, weights = instance.engine.scheduler, instance.engine.weights
    status = engine_pb2.EngineStatus(
        state=state_to_proto(instance.lifecycle.state),
        reason=instance.lifecycle.reason,
        instance=instance.identity.name,
        generation=instance.identity.generation,
        model=instance.identity.model,
        weight_version=weights.version,
        weights_digest=weights.digest,
        epoch=weights.epoch,
        ranks=_ranks_to_proto(instance),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_at_gate=instance.engine.gate.waiting,
        kv_blocks_used=scheduler.pool.used,
        kv_blocks_total=scheduler.pool.total,
        kv_blocks_cached=scheduler.pool.cached,
        limits=engine_pb2.Limits(
            max_context_tokens=scheduler.limits.max_context_tokens,
            max_running=scheduler.limits.max_running,
            max_waiting=scheduler.limits.max_waiting,
            kv_block_tokens=scheduler.limits.kv_block_tokens,
            prefill_chunk_tokens=scheduler.limits.prefill_chunk_tokens,
        ),
        placement=placement_to_proto(instance.placement),
        phases=[
            engine_pb2.Phase(name=p.name, begin_seconds=p.begin_seconds, end_seconds=p.end_seconds)
            for p in instance.phases.measured
        ],
        relay=instance.link.address if instance.link else "",
        membership=membership_to_proto(instance),
    )
    if closing := instance.engine.gate.closed_by:
        status.pause.CopyFrom(closing_to_proto(closing))
    if instance.fill_report is not None:
        status.fill.CopyFrom(report_to_proto(instance.fill_report, instance.lifecycle.state))
    if instance.progress is not None:
        status.progress.CopyFrom(progress_to_proto(instance.progress))
    if (update := instance.updating()) is not None:
        status.update.CopyFrom(update_to_proto(update))
    if instance.format is not None:
        facts = [weights_pb2.FormatFact(name=n, value=v) for n, v in instance.format.facts]
        status.format.CopyFrom(
            weights_pb2.Format(facts=facts, fingerprint=instance.format.fingerprint)
        )
    return status


def placement_to_proto(placement: Placement) -> weights_pb2.Placement:
    """Returns where the ranks lie."""
    return weights_pb2.Placement(
        tensor_parallel_size=placement.tensor_parallel_size,
        expert_parallel_size=placement.expert_parallel_size,
        redundant_experts=placement.redundant_experts,
        expert_map=placement.expert_map,
    )


def options_to_proto(options: PullOptions) -> weights_pb2.PullOptions:
    """Returns how to fill an instance."""
    message = weights_pb2.PullOptions(
        source_instance=options.source_instance,
        transport="" if options.transport == "auto" else options.transport,
        rate_limit_bytes_per_second=options.rate_limit_bytes_per_second,
        weights_digest=options.weights_digest,
    )
    if options.timeout_seconds:
        seconds, nanos = divmod(int(options.timeout_seconds * 1e9), 10**9)
        message.timeout.CopyFrom(duration_pb2.Duration(seconds=seconds, nanos=nanos))
    return message


def options_from_proto(message: weights_pb2.PullOptions) -> PullOptions:
    """Returns how to fill an instance. Raises `InvalidRequest`."""
    timeout = message.timeout.seconds + message.timeout.nanos / 1e9
    if message.rate_limit_bytes_per_second < 0 or not 0 <= timeout <= MAX_TIMEOUT_SECONDS:
        raise InvalidRequest("a rate limit or a timeout is out of range", field="options")
    return PullOptions(
        source_instance=message.source_instance,
        transport=message.transport,
        rate_limit_bytes_per_second=message.rate_limit_bytes_per_second,
        timeout_seconds=timeout,
        weights_digest=message.weights_digest.lower(),
    )


def progress_from_proto(message: weights_pb2.PullProgress) -> FillProgress:
    """Returns how far a fill is."""
    return FillProgress(
        phase=message.phase, source_instance=message.source_instance,
        transport=message.transport, bytes_verified=message.bytes_verified,
        bytes_total=message.bytes_total, note=message.note,
        transfer=clean_transfer(message.transfer),
    )  # fmt: skip


def progress_to_proto(progress: FillProgress) -> weights_pb2.PullProgress:
    """Returns how far a fill is."""
    return weights_pb2.PullProgress(
        phase=progress.phase, source_instance=progress.source_instance,
        transport=progress.transport, bytes_verified=progress.bytes_verified,
        bytes_total=progress.bytes_total, note=progress.note, transfer=progress.transfer,
    )  # fmt: skip


def report_from_proto(message: weights_pb2.PullReport) -> FillReport:
    """Returns what the relay's part of a fill did."""
    return FillReport(
        path=[
            PathStep(s.source_instance, s.address, s.transport, s.bytes_verified, s.reason, s.recut)
            for s in message.path
        ],
        transport=message.transport, bytes_moved=message.bytes_moved,
        bytes_reread=message.bytes_reread, bytes_copied=message.bytes_copied,
        blocks_reused=message.blocks_reused, model=message.model,
        weight_version=message.weight_version, weights_digest=message.weights_digest,
        source_weights_digest=message.source_weights_digest,
        seconds_matching=message.seconds_matching, seconds_transfer=message.seconds_transfer,
    )  # fmt: skip


def report_to_proto(report: FillReport, state: State) -> weights_pb2.PullReport:
    """Returns what a fill did."""
    return weights_pb2.PullReport(
        state=state_to_proto(state),
        path=map(step_to_proto, report.path),
        transport=report.transport, bytes_moved=report.bytes_moved,
        bytes_reread=report.bytes_reread, bytes_copied=report.bytes_copied,
        blocks_reused=report.blocks_reused, model=report.model,
        weight_version=report.weight_version, weights_digest=report.weights_digest,
        source_weights_digest=report.source_weights_digest,
        seconds_matching=report.seconds_matching, seconds_transfer=report.seconds_transfer,
        seconds_commit=report.seconds_commit, seconds_probe=report.seconds_probe,
    )  # fmt: skip


def update_to_proto(progress: UpdateProgress) -> engine_pb2.UpdateProgress:
    """Returns how far an update is."""
    return engine_pb2.UpdateProgress(
        phase=progress.phase, bytes_done=progress.bytes_done, bytes_total=progress.bytes_total,
        note=progress.note, session=progress.session,
    )  # fmt: skip


def step_to_proto(step: PathStep) -> weights_pb2.PathStep:
    """Returns a source that was tried."""
    return weights_pb2.PathStep(
        source_instance=step.source_instance, address=step.address, transport=step.transport,
        bytes_verified=step.bytes_verified, reason=step.reason, recut=step.recut,
    )  # fmt: skip


def conversion_to_proto(one: Conversion) -> engine_pb2.Conversion:
    """Returns what became of the type of some tensors."""
    return engine_pb2.Conversion(
        source=one.source, target=one.target, lossy=one.lossy, tensor_count=one.tensors,
        example=one.example,
    )  # fmt: skip


def _ranks_to_proto(instance: Instance) -> list[engine_pb2.RankStatus]:
    ranks = instance.ranks
    loads: list[LoadReport | None] = [*instance.load_reports] or [None] * len(ranks.workers)
    shown = weights_digest(instance.manifests) == instance.engine.weights.digest
    return [
        engine_pb2.RankStatus(
            rank=worker.rank,
            pid=worker.pid,
            arena_bytes=arena.manifest.data_bytes,
            digest=manifest.digest if shown else "",
            arena_address=arena.address,
            page_kind=arena.page_kind,
            sealed=is_sealed(descriptors[0]),
            load=_load_to_proto(load) if load else None,
        )
        for worker, arena, manifest, descriptors, load in zip(
            ranks.workers, ranks.arenas, instance.manifests, ranks.descriptors, loads, strict=False
        )
    ]


def _load_to_proto(report: LoadReport) -> engine_pb2.LoadReport:
    return engine_pb2.LoadReport(
        bytes_read=report.bytes_read, bytes_held=report.bytes_held,
        bytes_spilled=report.bytes_spilled,
        conversions=map(conversion_to_proto, report.conversions),
    )  # fmt: skip
