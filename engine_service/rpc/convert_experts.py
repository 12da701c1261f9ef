"""Protocol buffers ↔ where the experts of an engine lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_service.core.expert_map import ExpertMap, Slots, holders
from engine_service.core.expert_moves import known
from engine_service.core.instance import Instance
from engine_service.core.membership import ExpertReport
from engine_service.errors import InvalidRequest
from engine_service.rpc.convert import placement_to_proto
from engine_service.rpc.convert_membership import membership_to_proto
from relay_service.core.digests import root_digest
from relay_service.core.manifest import Unit
from seedrelay.v1 import engine_pb2


def layers_from_proto(messages: Iterable[engine_pb2.LayerExperts]) -> dict[int, Slots]:
    """Returns the layers of a map; the core checks them. Raises `InvalidRequest`."""
    layers: dict[int, Slots] = {}
    for message in messages:
        if message.layer in layers:
            raise InvalidRequest(f"layer {message.layer} stands twice", field="layers")
        layers[message.layer] = tuple(tuple(group.experts) for group in message.groups)
    if not layers:
        raise InvalidRequest("no layer is named", field="layers")
    return layers


def groups_from_proto(message: engine_pb2.ScaleExpertsRequest) -> int:
    """Returns how many groups of ranks there shall be. Raises `InvalidRequest`."""
    groups = message.expert_parallel_size
    if groups < 1:
        raise InvalidRequest(
            f"{groups} groups of ranks are too few", field="expert_parallel_size",
            expected="1 or more", found=str(groups),
        )  # fmt: skip
    return groups


def report_to_proto(instance: Instance, report: ExpertReport) -> engine_pb2.ExpertReport:
    """Returns what a recovery or a scaling did, and what has come of it."""
    weights, done = instance.engine.weights, done_to_proto(report)
    done.map.CopyFrom(map_to_proto(instance))
    done.membership.MergeFrom(membership_to_proto(instance) or engine_pb2.Membership())
    done.epoch, done.weights_digest = weights.epoch, weights.digest
    return done


def done_to_proto(report: ExpertReport) -> engine_pb2.ExpertReport:
    """Returns what a recovery or a scaling did, however long ago."""
    return engine_pb2.ExpertReport(
        pulled=[
            engine_pb2.PulledUnit(unit=one.unit, part=one.part, bytes=one.nbytes, source=one.source)
            for one in report.pulled
        ],
        bytes_pulled=report.bytes_pulled, bytes_copied=report.bytes_copied,
        experts_moved=report.experts_moved, ranks_started=report.ranks_started,
        seconds_started=report.seconds_started, seconds_pulled=report.seconds_pulled,
        seconds_paused=report.seconds_paused, seconds=report.seconds,
    )  # fmt: skip


def map_to_proto(instance: Instance, layers: Iterable[int] = ()) -> engine_pb2.ExpertMap:
    """Returns where the experts of some layers lie, or of all; with their digests.

    Raises `WrongState` for a model without, `InvalidRequest` for a layer without.
    """
    experts = known(instance)
    wanted = sorted(set(layers)) or sorted(experts.layers)
    for layer in wanted:
        if layer not in experts.layers:
            raise InvalidRequest(f"layer {layer} has no experts", field="layers", found=str(layer))
    units = [{unit.name: unit for unit in manifest.units} for manifest in instance.manifests]
    return engine_pb2.ExpertMap(
        expert_count=experts.experts,
        placement=placement_to_proto(instance.placement),
        layers=[
            engine_pb2.LayerExperts(
                layer=layer,
                groups=[engine_pb2.GroupExperts(experts=g) for g in experts.layers[layer]],
                digests=_digests(experts, layer, units, instance.placement.tensor_parallel_size),
            )
            for layer in wanted
        ],
    )


def _digests(
    experts: ExpertMap, layer: int, units: Sequence[dict[str, Unit]], parts: int
) -> list[bytes]:
    """Returns a root over the parts of each expert; none while one of them isn't verified.

    That of an expert that nobody holds is empty.
    """
    places, found = holders(experts.layers[layer]), []
    for expert in range(experts.experts):
        if expert not in places:
            found.append(b"")
            continue
        group = places[expert][0][0]
        name = f"layer.{layer}.expert.{expert}"
        held = [units[group * parts + part].get(name) for part in range(parts)]
        verified = [unit.digest for unit in held if unit and unit.digests]
        if len(verified) < parts:
            return []
        found.append(root_digest("expert", verified))
    return found
