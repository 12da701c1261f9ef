"""Changes which slots hold which experts, while the instance serves. Plain Python.

One layer after another, each a commit of its own: staged and checked on all ranks, then
moved between two steps. So staging takes the memory of one layer's moved experts, running
answers wait for one layer at a time, and a layer that cannot be staged stays as it is.
The weights are the same afterwards, and so is the KV that they have computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engine_service.core.expert_map import ExpertMap, Slots, moves
from engine_service.core.expert_messages import (
    DropExperts,
    ExpertsMoved,
    MoveExperts,
    Staged,
    StageExperts,
)
from engine_service.core.instance import Instance
from engine_service.core.messages import Done
from engine_service.core.prefix import kv_origin
from engine_service.core.replies import quiet
from engine_service.core.turn import MOVES
from engine_service.errors import EngineError, RankDied, RanksLost, WrongState
from relay_service.core.instance import State
from relay_service.core.manifest import Manifest, Unit, weights_digest

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class MoveReport:
    """What a change of the map did."""

    layers: int = 0
    experts_moved: int = 0
    """Slots that got another expert."""
    bytes_moved: int = 0
    """Between ranks."""
    seconds_staged: float = 0.0
    seconds_paused: float = 0.0
    """In which no step could run, over all layers."""


class ExpertMoves:
    """The changes of one instance, one at a time."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    async def change(self, layers: Mapping[int, Slots]) -> MoveReport:
        """Moves experts to where some layers shall have them; returns when all are there.

        Raises `WrongState` unless the instance serves experts, `InvalidRequest` for a map that
        is wrong, both before anything moves; `ArenaError` or `ResourceExhausted` naming the
        layer that could not be staged and how many had been moved; `RankDied`.
        """
        # A caller who leaves doesn't end what has begun.
        work = asyncio.ensure_future(self._change(layers))
        return await asyncio.shield(quiet(work))

    async def _change(self, layers: Mapping[int, Slots]) -> MoveReport:
        turn = self._instance.turn
        if turn.holder not in ("", MOVES):
            raise WrongState(
                f"{turn.holder} changes the weights: experts are moved afterwards",
                field="update", found=turn.holder,
            )  # fmt: skip
        async with turn.taken(MOVES):
            if known(self._instance).lost:
                raise WrongState(
                    "experts are lost: none are moved until they are back",
                    field="experts",
                    hint="see `seedrelay experts recover`",
                )
            target, report = known(self._instance).changed(layers), MoveReport()
            self._check_ready()
            try:
                for layer, slots in sorted(target.layers.items()):
                    if slots != known(self._instance).layers[layer]:
                        await self._try(layer, slots, report)
            finally:
                if report.layers:
                    await self._instance.tell_relay()
            _log.info("moved %d experts in %d layers", report.experts_moved, report.layers)
            return report

    def _check_ready(self) -> None:
        lifecycle = self._instance.lifecycle
        if lifecycle.state is not State.READY:
            raise WrongState(
                f"{self._instance.identity.name} is {lifecycle.state}: "
                "experts are moved while it serves",
                field="state", expected="READY", found=str(lifecycle.state),
            )  # fmt: skip

    async def _try(self, layer: int, slots: Slots, report: MoveReport) -> None:
        """Moves a layer; what stops it says what became of the map."""
        try:
            self._check_ready()  # it may be draining by now
            await self._move(layer, slots, report)
        except RankDied:
            raise
        except EngineError as error:
            raise type(error)(
                f"layer {layer} stays as it was, and {report.layers} before it were moved: "
                f"{error.message}",
                **error.details,
            ) from error

    async def _move(self, layer: int, slots: Slots, report: MoveReport) -> None:
        instance, ranks = self._instance, self._instance.ranks
        old = known(instance)
        if old.groups != len(slots):
            raise RanksLost("ranks were lost while experts were moved")
        planned = moves(old.layers[layer], slots)
        units = [_by_name(manifest) for manifest in instance.manifests]
        parts = instance.placement.tensor_parallel_size
        digests: list[dict[int, tuple[bytes, ...]]] = [{} for _ in units]
        for move in planned:
            name = f"layer.{layer}.expert.{move.expert}"
            for part in range(parts):
                source = units[move.source * parts + part][name]
                digests[move.target * parts + part][move.expert] = source.digests
        began = time.monotonic()
        try:
            staged = await ranks.all([StageExperts(layer, slots, d) for d in digests], Staged)
        except RankDied:
            raise
        except EngineError:
            await ranks.in_time(DropExperts(), Done, instance.config.patience_seconds)
            raise
        report.seconds_staged += time.monotonic() - began
        async with instance.engine.between_steps():
            if instance.experts is not old:  # what was staged is for ranks that were
                raise RanksLost("ranks were lost while experts were staged")
            began = time.monotonic()
            replies = await self._moved()
            self._follow(old.changed({layer: slots}), replies, digests)
            report.seconds_paused += time.monotonic() - began
        report.layers += 1
        report.experts_moved += len(planned)
        report.bytes_moved += sum(reply.bytes_received for reply in staged)

    async def _moved(self) -> list[ExpertsMoved]:
        """Has all ranks put a layer into place; without one nobody knows what lies where."""
        ranks, seconds = self._instance.ranks, self._instance.config.patience_seconds
        try:
            return await ranks.in_time(MoveExperts(), ExpertsMoved, seconds)
        except RankDied as error:
            await self._instance.fail(f"a move of experts ended half-way: {error.message}")
            raise

    def _follow(
        self,
        experts: ExpertMap,
        replies: list[ExpertsMoved],
        digests: list[dict[int, tuple[bytes, ...]]],
    ) -> None:
        """Says what lies where now. The weights are the same, and so is KV."""
        instance, weights = self._instance, self._instance.engine.weights
        instance.experts = experts
        instance.manifests = [
            _renamed(manifest, reply.units, arrived)
            for manifest, reply, arrived in zip(instance.manifests, replies, digests, strict=True)
        ]
        instance.engine.weights = msgspec.structs.replace(
            weights, digest=weights_digest(instance.manifests), epoch=weights.epoch + 1,
            kv_origin=weights.kv_origin or kv_origin(weights),
        )  # fmt: skip


def known(instance: Instance) -> ExpertMap:
    """Returns where the experts lie. Raises `WrongState` for a model without."""
    if instance.experts is None:
        raise WrongState(f"{instance.identity.name} serves no experts", field="experts")
    return instance.experts


def _by_name(manifest: Manifest) -> dict[str, Unit]:
    return {unit.name: unit for unit in manifest.units}


def _renamed(
    manifest: Manifest, units: tuple[Unit, ...], arrived: Mapping[int, tuple[bytes, ...]]
) -> Manifest:
    """Returns a rank's manifest with a layer's units as they are called now."""
    before = _by_name(manifest)
    called = []
    for unit in units:
        expert = int(unit.name.rpartition(".")[2])
        digests = arrived[expert] if expert in arrived else before[unit.name].digests
        called.append(msgspec.structs.replace(unit, digests=digests))
    return manifest.renamed(called)
