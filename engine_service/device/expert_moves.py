"""Moves experts of one layer between the slots of all ranks, while captured graphs stay.

In two steps: what slots shall hold is fetched beside the arena and checked against the
digests of who gives it; then, between two steps on every rank, it is copied into place and
map, names and graphs follow. What can fail does so in the first, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from engine_service.core.expert_map import Move, RankExperts, Slots, moves
from engine_service.core.expert_messages import (
    ExpertCommand,
    ExpertsMoved,
    MoveExperts,
    Staged,
    StageExperts,
)
from engine_service.core.member_messages import Place, Placed
from engine_service.core.messages import Done
from engine_service.device.arena import Arena
from engine_service.device.models.llama import Llama
from engine_service.device.models.llama_format import layer_specs
from engine_service.device.parallel import Group
from engine_service.device.plan import Plan
from engine_service.device.sharding import Shard
from engine_service.errors import ArenaError, ConfigError, ResourceExhausted, WrongState
from relay_service.core.digests import block_digest
from relay_service.core.manifest import BLOCK_BYTES, Unit


class _Layer(NamedTuple):
    """A layer that is staged."""

    number: int
    experts: RankExperts
    contents: dict[int, Tensor]
    """By slot: what it shall hold, as bytes."""


class ExpertMover:
    """The experts of one rank: where they lie, and how they get elsewhere."""

    def __init__(self, plan: Plan, arena: Arena, model: Llama, world: Group) -> None:
        """`world` joins all ranks of the instance."""
        self.shard = plan.shard
        self._plan = plan
        self._arena = arena
        self._model = model
        self._world = world
        self._staged: _Layer | None = None
        self.passed: dict[int, tuple[int, ...]] = {}
        """Experts that rows pass over, by layer: nobody holds them."""

    def answer(self, command: ExpertCommand) -> Staged | ExpertsMoved | Done:
        """Does what the front asks. Raises what `stage` and `move` do."""
        if isinstance(command, StageExperts):
            return self.stage(command.layer, command.slots, command.digests)
        if isinstance(command, MoveExperts):
            return self.move()
        self.drop()
        return Done()

    def stage(self, layer: int, slots: Slots, digests: dict[int, tuple[bytes, ...]]) -> Staged:
        """Fetches what the slots of a layer shall hold; all ranks do so together.

        `digests` are those of the blocks of every expert that this rank gets. Raises
        `ArenaError` for bytes that are not what they should be, `ResourceExhausted`, and
        `WrongState` when another rank has no memory; `CollectiveFailed`.
        """
        self._staged = None
        experts = self._experts
        planned = moves(experts.map.layers[layer], slots)
        units = self._units(layer)
        contents = self._allocated([one for one in planned if one.target == experts.rank], units)
        for move in planned:
            self._exchange(move, units, contents)
        for move in planned:
            if move.target == experts.rank:
                _check(layer, move, contents[move.target_slot], digests[move.expert])
        placed = msgspec.structs.replace(experts, map=experts.map.changed({layer: slots}))
        self._staged = _Layer(layer, placed, contents)
        remote = (m for m in planned if m.target == experts.rank != m.source)
        return Staged(sum(contents[move.target_slot].nbytes for move in remote))

    def move(self) -> ExpertsMoved:
        """Puts what is staged into place. Raises `WrongState` where nothing is."""
        if self._staged is None:
            raise WrongState("no experts are staged")
        (layer, experts, contents), self._staged = self._staged, None
        units = self._units(layer)
        put = [(units[slot], data) for slot, data in contents.items()]
        return ExpertsMoved(tuple(self._follow([layer], experts, put)))

    def place(self, command: Place) -> Placed:
        """Follows a map of all layers, with what was taken for it; seals a fresh arena.

        Raises `ArenaError` where a slot, or a fresh arena, lacks what it should hold, or what
        lies there is no whole; `ConfigError` for a map or number that cannot be this rank's.
        """
        arena, taken, layers = self._arena, self._plan.taken, sorted(command.experts.layers)
        experts = self._placed(command)
        if not arena.whole:
            raise ArenaError("the weights were left half-changed")
        put = []
        for layer in layers:
            for unit, expert in zip(self._units(layer), experts.slots(layer), strict=True):
                name = f"layer.{layer}.expert.{expert}"
                data = taken.of(unit, name, arena.sequence)
                if data is not None:
                    put.append((unit, torch.frombuffer(data, dtype=torch.uint8)))
                elif unit.name != name:
                    raise ArenaError(f"{name} was not taken for the slot of {unit.name}", unit=name)
        if not arena.sealed:
            self._check_landed()
        self.drop()
        self._follow(layers, experts, put, command.rank)
        self.passed = command.experts.lost if command.routes else {}
        self._model.pass_over(self.passed)
        if not arena.sealed:
            arena.seal()
        return Placed(arena.manifest.without_digests())

    @property
    def unserved(self) -> bool:
        """Whether rows may choose experts that nobody holds."""
        held = self.shard.experts
        return held is not None and bool(held.map.lost) and not self.passed

    def drop(self) -> None:
        """Forgets what is staged or taken, and not in its place."""
        self._staged = None
        self._plan.taken.drop()

    def _placed(self, command: Place) -> RankExperts:
        """Returns the experts of this rank by a new map, if it can be followed."""
        group, part = divmod(command.rank, self.shard.ranks)
        known, new = self._experts.map, command.experts
        sizes = {
            (layer, len(rows), len(held)) for layer, rows in new.layers.items() for held in rows
        }
        slots = {layer: len(self._experts.slots(layer)) for layer in known.layers}
        groups = self._world.ranks // self.shard.ranks
        if (part, new.experts) != (self.shard.rank, known.experts) or not 0 <= group < groups:
            raise ConfigError(f"rank {command.rank} cannot be the number of this one", field="rank")
        if sizes != {(layer, groups, count) for layer, count in slots.items()}:
            raise ConfigError(
                f"the expert map is not one of {groups} groups with as many slots as these",
                field="expert_map",
            )
        return RankExperts(new, group)

    def _check_landed(self) -> None:
        landed = self._plan.taken.landed
        if lacking := [u.name for u in self._arena.manifest.units if u.name not in landed]:
            raise ArenaError(
                f"the arena lacks {len(lacking)} units, such as {lacking[0]}", unit=lacking[0]
            )

    def _follow(
        self, layers: Iterable[int], experts: RankExperts, put: Iterable[tuple[Unit, Tensor]],
        rank: int | None = None,
    ) -> list[Unit]:  # fmt: skip
        """Puts bytes into slots, and has names, map and graphs follow. Returns the units."""
        shard = msgspec.structs.replace(self.shard, experts=experts)
        renamed = [unit for layer in layers for unit in self._renamed(layer, shard, experts)]
        with self._arena.committing():
            for unit, data in put:
                self._arena.bytes_of(unit).copy_(data)
            self._arena.rename(renamed, rank)
            for layer in layers:
                self._model.place(layer, experts)
            self.shard = shard
        return renamed

    def _renamed(self, layer: int, shard: Shard, experts: RankExperts) -> Iterator[Unit]:
        specs = layer_specs(self._plan.config, self._plan.dtype, shard, self._plan.layout, layer)
        called = {spec.name: spec for spec in specs}
        for expert, unit in zip(experts.slots(layer), self._units(layer), strict=True):
            name = f"layer.{layer}.expert.{expert}"
            tensors = tuple(
                msgspec.structs.replace(entry, name=spec.name, logical=spec.logical, cut=spec.cut)
                for entry, spec in zip(unit.tensors, called[name].tensors, strict=True)
            )
            yield msgspec.structs.replace(unit, name=name, tensors=tensors)

    @property
    def _experts(self) -> RankExperts:
        if self.shard.experts is None:
            raise WrongState("the model has no experts")
        return self.shard.experts

    def _units(self, layer: int) -> list[Unit]:
        """Returns what lies in each slot."""
        units = {unit.name: unit for unit in self._arena.manifest.units}
        return [units[f"layer.{layer}.expert.{e}"] for e in self._experts.slots(layer)]

    def _allocated(self, wanted: Sequence[Move], units: Sequence[Unit]) -> dict[int, Tensor]:
        """Returns memory by slot, once every rank has its own: none waits for another in vain."""
        like, failure = self._arena.bytes_of(units[0]), ""
        contents: dict[int, Tensor] = {}
        try:
            contents = {move.target_slot: torch.empty_like(like) for move in wanted}
        except (RuntimeError, MemoryError) as error:
            failure = str(error)
        failed = torch.tensor([float(bool(failure))], device=like.device)
        others = float(self._world.all_reduce(failed))
        if failure:
            raise ResourceExhausted(f"no memory to stage {len(wanted)} experts: {failure}")
        if others:
            raise WrongState("another rank has no memory to stage experts")
        return contents

    def _exchange(self, move: Move, units: Sequence[Unit], contents: dict[int, Tensor]) -> None:
        """Takes this rank's part in a move. All go through all moves in the same order."""
        own, part = self._experts.rank, self.shard.rank
        if move.source == own:
            given = self._arena.bytes_of(units[move.source_slot])
            if move.target == own:
                contents[move.target_slot].copy_(given)
            else:
                self._world.send(given, move.target * self.shard.ranks + part)
        elif move.target == own:
            peer = move.source * self.shard.ranks + part
            self._world.receive(contents[move.target_slot], peer)


def _check(layer: int, move: Move, data: Tensor, digests: Sequence[bytes]) -> None:
    if tuple(_digests(data)) != tuple(digests):
        raise ArenaError(
            f"expert {move.expert} of layer {layer} came from group {move.source} of ranks with "
            "other bytes than it should have",
            tensor=f"layer.{layer}.expert.{move.expert}",
        )


def _digests(data: Tensor) -> Iterator[bytes]:
    for start in range(0, len(data), BLOCK_BYTES):
        yield block_digest(data[start : start + BLOCK_BYTES].cpu().numpy().data)
