"""Which slot of which rank holds which expert, and how one map becomes another. Plain Python.

A layer has more slots than experts where hot ones are held several times, each time on
another rank (arxiv.org/abs/2412.19437, redundant experts). Every rank has as many slots
as any other, and none stays empty. Where ranks were lost, nobody may hold an expert.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from engine_service.errors import ConfigError, InvalidRequest

Slots = tuple[tuple[int, ...], ...]
"""Of one layer: the expert in each slot, by expert-parallel rank."""
TURNS = 60
"""Rows take turns among the replicas of an expert: evenly where there are up to six."""
_MAX_LISTED = 20
_NOBODY = [(-1, -1)]


class Move(NamedTuple):
    """An expert that a slot gets, and the slot that gives it."""

    expert: int
    source: int
    """Expert-parallel rank that gives it."""
    source_slot: int
    target: int
    """Expert-parallel rank that gets it; may be the same."""
    target_slot: int


class ExpertMap(msgspec.Struct, frozen=True):
    """Where the experts of all sparse layers lie."""

    experts: int
    """Of each layer."""
    layers: dict[int, Slots]

    @classmethod
    def linear(cls, experts: int, layers: list[int], ranks: int, redundant: int = 0) -> Self:
        """Puts experts into slots in their order, beginning anew where all have been placed."""
        count = (experts + redundant) // ranks
        each = tuple(
            tuple((rank * count + slot) % experts for slot in range(count)) for rank in range(ranks)
        )
        return cls(experts, dict.fromkeys(layers, each))

    def changed(self, layers: Mapping[int, Slots]) -> Self:
        """Returns a map with some layers placed otherwise.

        Raises `InvalidRequest` that lists all that is wrong with them.
        """
        faults = [fault for layer in sorted(layers) for fault in self._faults(layer, layers[layer])]
        if faults:
            more = len(faults) - _MAX_LISTED
            listed = "; ".join(faults[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
            raise InvalidRequest(f"the expert map is wrong: {listed}", field="layers")
        return type(self)(self.experts, self.layers | dict(layers))

    def without(self, groups: Collection[int]) -> Self:
        """Returns the map of the other groups, in their order. Nobody may hold an expert then."""
        layers = {
            layer: tuple(held for group, held in enumerate(slots) if group not in groups)
            for layer, slots in self.layers.items()
        }
        return type(self)(self.experts, layers)

    @property
    def lost(self) -> dict[int, tuple[int, ...]]:
        """Experts that nobody holds, by layer; layers that hold all are left out."""
        found = {layer: tuple(self._lost(slots)) for layer, slots in self.layers.items()}
        return {layer: experts for layer, experts in found.items() if experts}

    @property
    def groups(self) -> int:
        """Groups of ranks."""
        return len(next(iter(self.layers.values()), ()))

    @property
    def slots(self) -> int:
        """Slots of each group in each layer; 0 where no group is left."""
        rows = next(iter(self.layers.values()), ())
        return len(rows[0]) if rows else 0

    @property
    def digest(self) -> str:
        """Names the map: the same for the same places, in hexadecimal."""
        return hashlib.sha256(msgspec.msgpack.encode(sorted(self.layers.items()))).hexdigest()[:16]

    def _faults(self, layer: int, slots: Slots) -> Iterator[str]:
        known = self.layers.get(layer)
        if known is None:
            yield f"layer {layer} has no experts"
            return
        if len(slots) != len(known):
            yield f"layer {layer}: {len(slots)} ranks, {len(known)} are needed"
        for rank, held in enumerate(slots):
            where = f"layer {layer}, rank {rank}"
            if len(held) != len(known[0]):
                yield f"{where}: {len(held)} slots, {len(known[0])} are needed"
            for expert, count in sorted(Counter(held).items()):
                if not 0 <= expert < self.experts:
                    yield f"{where}: there is no expert {expert}"
                elif count > 1:
                    yield f"{where}: expert {expert} is there {count} times"
        if lost := self._lost(slots):
            yield f"layer {layer}: nobody holds {', '.join(map(str, lost))}"

    def _lost(self, slots: Slots) -> list[int]:
        placed = {expert for held in slots for expert in held}
        return [expert for expert in range(self.experts) if expert not in placed]


class RankExperts(msgspec.Struct, frozen=True):
    """The experts of one expert-parallel rank."""

    map: ExpertMap
    rank: int

    def slots(self, layer: int) -> tuple[int, ...]:
        """Returns the expert in each slot."""
        return self.map.layers[layer][self.rank]

    def turns(self, layer: int) -> list[list[int]]:
        """Returns, by expert and turn, the slot here that serves; -1 for one elsewhere.

        At every turn exactly one rank serves an expert; none does one that is lost.
        """
        places = holders(self.map.layers[layer])
        each = [places.get(expert, _NOBODY) for expert in range(self.map.experts)]
        return [
            [slot if rank == self.rank else -1 for rank, slot in _repeated(held, TURNS)]
            for held in each
        ]


class _MapFile(msgspec.Struct):
    """What is read of a map file; `experts show --json` writes more."""

    layers: dict[int, Slots]


def read_map(path: Path) -> dict[int, Slots]:
    """Reads the layers of a map file. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_MapFile).layers
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: {error}", field="expert_map",
            expected='{"layers": {"LAYER": [[EXPERT, ...] per rank]}}',
        ) from error  # fmt: skip


def holders(slots: Slots) -> dict[int, list[tuple[int, int]]]:
    """Returns rank and slot of every replica of each expert of a layer."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, held in enumerate(slots):
        for slot, expert in enumerate(held):
            found.setdefault(expert, []).append((rank, slot))
    return found


def moves(old: Slots, new: Slots) -> list[Move]:
    """Returns what every slot that changes gets, in an order that all ranks share.

    What a rank holds already it gives itself; otherwise whoever has given least so far.
    Raises `InvalidRequest` for an expert that nobody holds.
    """
    places, given = holders(old), Counter[int]()
    if lost := sorted({expert for held in new for expert in held} - places.keys()):
        raise InvalidRequest(f"nobody holds {', '.join(map(str, lost))}", field="layers")
    made: list[Move] = []
    for target, held in enumerate(new):
        for slot, expert in enumerate(held):
            if old[target][slot] == expert:
                continue
            source, source_slot = min(
                places[expert], key=lambda place: (place[0] != target, given[place[0]])
            )
            given[source] += source != target
            made.append(Move(expert, source, source_slot, target, slot))
    return made


def _repeated(places: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return [places[turn % len(places)] for turn in range(count)]
