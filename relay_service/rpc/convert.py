"""Protocol buffers ↔ core records. What came from a peer is checked by the core."""

from __future__ import annotations

from relay_service.core.format import Format, Placement
from relay_service.core.instance import (
    MAX_READERS,
    Artifact,
    Filling,
    Instance,
    RankBlocks,
    Reader,
    State,
    Weights,
)
from relay_service.core.logs import clean_transfer
from relay_service.core.match import Match, Target
from relay_service.core.pull_report import PathStep, PullOptions
from relay_service.core.transfers import Transfer
from relay_service.errors import InvalidRequest, SourceBusy
from relay_service.rpc.convert_transfer import step_to_proto
from seedrelay.v1 import relay_pb2, weights_pb2

MAX_TIMEOUT_SECONDS = 315_576_000_000


def state_to_proto(state: State) -> str:
    """Returns the name of the state's enum value; messages take it as it is."""
    return f"INSTANCE_STATE_{state}"


def state_from_proto(value: weights_pb2.InstanceState) -> State:
    """Returns the state. Raises `InvalidRequest` for an unknown one."""
    try:
        return State(weights_pb2.InstanceState.Name(value).removeprefix("INSTANCE_STATE_"))
    except ValueError as error:
        raise InvalidRequest(f"unknown state {value}", field="state") from error


def format_to_proto(format_: Format) -> weights_pb2.Format:
    """Returns the facts and their fingerprint."""
    facts = [weights_pb2.FormatFact(name=name, value=value) for name, value in format_.facts]
    return weights_pb2.Format(facts=facts, fingerprint=format_.fingerprint)


def format_from_proto(message: weights_pb2.Format) -> Format:
    """Returns the facts; a fingerprint is never taken on trust."""
    return Format(tuple((fact.name, fact.value) for fact in message.facts))


def placement_to_proto(placement: Placement) -> weights_pb2.Placement:
    """Returns where the ranks lie."""
    return weights_pb2.Placement(
        tensor_parallel_size=placement.tensor_parallel_size,
        expert_parallel_size=placement.expert_parallel_size,
        redundant_experts=placement.redundant_experts,
        expert_map=placement.expert_map,
    )


def placement_from_proto(message: weights_pb2.Placement) -> Placement:
    """Returns where the ranks lie."""
    return Placement(
        message.tensor_parallel_size,
        message.expert_parallel_size,
        message.redundant_experts,
        message.expert_map,
    )


def instance_to_proto(instance: Instance) -> relay_pb2.Instance:
    """Returns an announced instance."""
    return relay_pb2.Instance(
        instance=instance.instance,
        generation=instance.generation,
        model=instance.model,
        state=state_to_proto(instance.state),
        format=format_to_proto(instance.format),
        placement=placement_to_proto(instance.placement),
        weight_version=instance.weights.version,
        weights_digest=instance.weights.digest,
        epoch=instance.weights.epoch,
        ranks=[
            relay_pb2.RankBlocks(
                rank=r.rank, have_blocks=r.have_blocks, blocks=r.blocks,
                arena_bytes=r.arena_bytes, digest=r.digest,
            )
            for r in instance.ranks
        ],
        artifacts=[
            weights_pb2.Artifact(name=a.name, byte_count=a.nbytes, sha256=a.sha256)
            for a in instance.artifacts
        ],
        address=instance.address,
        lease_count=instance.leases,
        readers=[
            relay_pb2.Reader(instance=r.instance, transfer=r.transfer, bytes_served=r.bytes_served)
            for r in instance.readers
        ],
        filling=_filling_to_proto(instance.filling),
    )  # fmt: skip


def instance_from_proto(message: relay_pb2.Instance) -> Instance:
    """Returns an announced instance. Raises `InvalidRequest`."""
    if not message.instance or not message.generation:
        raise InvalidRequest("an instance needs a name and a generation", field="instance")
    return Instance(
        instance=message.instance,
        generation=message.generation,
        model=message.model,
        state=state_from_proto(message.state),
        format=format_from_proto(message.format),
        placement=placement_from_proto(message.placement),
        weights=Weights(message.weight_version, message.weights_digest, message.epoch),
        ranks=tuple(
            RankBlocks(r.rank, r.have_blocks, r.blocks, r.arena_bytes, r.digest)
            for r in message.ranks
        ),
        artifacts=tuple(Artifact(a.name, a.byte_count, a.sha256) for a in message.artifacts),
        address=message.address,
        leases=message.lease_count,
        readers=tuple(
            Reader(r.instance, clean_transfer(r.transfer), r.bytes_served)
            for r in message.readers[:MAX_READERS]
        ),
        filling=_filling_from_proto(message.filling) if message.HasField("filling") else None,
    )


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


def progress_to_proto(transfer: Transfer) -> weights_pb2.PullProgress:
    """Returns how far a pull is."""
    puller, report = transfer.puller, transfer.puller.report
    step = report.path[-1] if report.path else PathStep("", "")
    return weights_pb2.PullProgress(
        phase=report.phase,
        source_instance=step.source_instance,
        transport=step.transport,
        bytes_verified=puller.bytes_verified,
        bytes_total=sum(r.total_bytes for r in puller.receivers),
        note=report.note,
        transfer=transfer.transfer,
    )


def report_to_proto(transfer: Transfer) -> weights_pb2.PullReport:
    """Returns what a finished pull did."""
    puller, report = transfer.puller, transfer.puller.report
    return weights_pb2.PullReport(
        state=state_to_proto(transfer.holding.state),
        path=map(step_to_proto, report.path),
        transport=report.path[-1].transport,
        bytes_moved=puller.bytes_moved,
        bytes_reread=puller.bytes_reread,
        bytes_copied=puller.bytes_copied,
        blocks_reused=report.blocks_reused,
        model=report.model,
        weight_version=report.weight_version,
        weights_digest=report.weights_digest,
        source_weights_digest=report.source_weights_digest,
        seconds_matching=report.seconds_matching,
        seconds_transfer=report.seconds_transfer,
    )  # fmt: skip


def target_from_proto(request: relay_pb2.ListSourcesRequest) -> Target:
    """Returns for what sources are looked for."""
    return Target(
        request.instance,
        format_from_proto(request.format) if request.HasField("format") else None,
        placement_from_proto(request.placement) if request.HasField("placement") else None,
    )


def source_to_proto(found: Match) -> relay_pb2.Source:
    """Returns how an instance was judged."""
    return relay_pb2.Source(
        instance=instance_to_proto(found.instance), fits=found.fits,
        reason=found.reason, recut=found.recut,
    )  # fmt: skip


def sent_on_to_proto(busy: SourceBusy) -> relay_pb2.SentOn:
    """Returns where a busy source sends a reader."""
    return relay_pb2.SentOn(
        next_instance=busy.details["next"], manifest_instance=busy.details["manifest"],
        upstream_instances=busy.upstream, probe=busy.probe,
    )  # fmt: skip


def sent_on_from_proto(source: str, message: relay_pb2.SentOn) -> SourceBusy:
    """Returns what it means to a reader."""
    return SourceBusy(
        f"{source} is busy: {message.next_instance} reads from it",
        next=message.next_instance, manifest=message.manifest_instance,
    ).knowing(message.upstream_instances, message.probe)  # fmt: skip


def _filling_to_proto(filling: Filling | None) -> relay_pb2.Filling | None:
    if filling is None:
        return None
    return relay_pb2.Filling(
        model=filling.model, weight_version=filling.version, weights_digest=filling.digest,
        epoch=filling.epoch, source_instance=filling.source,
    )  # fmt: skip


def _filling_from_proto(message: relay_pb2.Filling) -> Filling:
    return Filling(
        message.model, message.weight_version, message.weights_digest, message.epoch,
        message.source_instance,
    )  # fmt: skip
