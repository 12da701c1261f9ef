"""Another instance whose weights can be compared with ours. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.core.instance import Instance
from engine_service.errors import WrongState
from relay_service.core.instance import Instance as Announced
from relay_service.core.manifest import Unit


@dataclass(frozen=True, slots=True)
class Peer:
    """What an instance holds, unit by unit, wherever it lies there."""

    words: str
    parts: int
    """Tensor-parallel ranks, as many as here."""
    units: dict[tuple[int, str], Unit]
    """By tensor-parallel rank and name."""


async def find_peer(instance: Instance, name: str) -> Peer:
    """Finds an instance of the fleet and asks what it holds.

    Raises `WrongState` for one that isn't there, holds no weights, or holds them in another
    format or cut otherwise; `RelayUnreachable`.
    """
    if instance.link is None:
        raise WrongState(
            "another instance is found through a relay, and none is attached",
            field="against", hint="start the engine with --relay",
        )  # fmt: skip
    offers = await instance.link.offers()
    named = [one for one in offers if one.instance == name]
    found = next((one for one in named if one.state.holds_weights), None)
    if found is None:
        state = f"is {named[0].state}" if named else "is not in the fleet"
        raise WrongState(
            f"{name} {state}: there is nothing to compare with", field="against", found=name,
            expected=" | ".join(sorted(o.instance for o in offers if o.state.holds_weights)),
        )  # fmt: skip
    if difference := _difference(instance, found):
        raise WrongState(
            f"{name} cannot be compared with {instance.identity.name}: {difference}",
            field="against", found=name,
        )  # fmt: skip
    parts = instance.placement.tensor_parallel_size
    manifests = await instance.link.manifests_of(found)
    units = {
        (rank % parts, unit.name): unit
        for rank, manifest in enumerate(manifests)
        for unit in manifest.units
    }
    return Peer(f"{name}: {found.weights.version}, epoch {found.weights.epoch}", parts, units)


def _difference(instance: Instance, other: Announced) -> str:
    """Says why bytes of two instances mean different things; empty when they don't."""
    if instance.format and (difference := other.format.difference(instance.format)):
        return difference
    theirs = other.placement.tensor_parallel_size
    mine = instance.placement.tensor_parallel_size
    return f"tensor_parallel_size: seed {theirs}, target {mine}" if theirs != mine else ""
