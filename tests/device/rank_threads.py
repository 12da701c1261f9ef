"""All ranks of an instance as threads of this process, joined by gloo as processes would be."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import msgspec
from tiny_llama import Sequence, start_message

from engine_service.core.expert_map import ExpertMap, Slots, moves
from engine_service.core.member_messages import Place, Placed, Rejoin
from engine_service.core.messages import Loaded
from engine_service.core.step_messages import Sampled
from engine_service.device import parallel
from engine_service.device.rank import Rank
from relay_service.core.manifest import Manifest, Unit


class Ranks:
    """`tp` x `ep` ranks that serve a folder's weights, captured; use it in a `with` block.

    Dummies are captured on zeros and serve nothing until somebody has filled and sealed them.
    """

    def __init__(
        self, folder: Path, tp: int = 1, ep: int = 1, *, dummy: bool = False, **settings
    ) -> None:
        self.tp, self.ep = tp, ep
        self.folder, self._dummy = folder, dummy
        self._threads = ThreadPoolExecutor(tp * ep)
        self._meeting = os.memfd_create("tests")
        settings = {"collective_timeout_seconds": 60} | settings
        self.starts = [
            start_message(
                folder, rank=rank, world_size=tp * ep, expert_parallel_size=ep, **settings
            )
            for rank in range(tp * ep)
        ]
        self.ranks: list[Rank] = []
        self._groups: list[parallel.Groups] = []
        self.loaded: list[Manifest] = []
        """What each rank says that it has read; nothing of dummies."""

    def __enter__(self) -> Self:
        self.ranks = list(self._threads.map(self._built, self.starts))
        if not self._dummy:
            self.loaded = [loaded.manifest for loaded in self._threads.map(self._load, self.ranks)]
        list(self._threads.map(Rank.capture, self.ranks))
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for groups in self._groups:
            parallel.leave(groups)
        for name in [name for name in parallel._joined if name.startswith("tests")]:
            del parallel._joined[name]
        os.close(self._meeting)  # last: a store that cannot be opened any more ends the process

    def free(self) -> None:
        """Gives the arenas back, which otherwise stay mapped; no tensor may be looked at then."""
        for rank in self.ranks:
            rank.arena._memory.close()
            rank.arena.close()
        self.ranks = []

    def each(self, work) -> list:
        """Does something with every rank at once; returns what came of it, errors too."""

        def attempt(rank: Rank):
            try:
                return work(rank)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

        return list(self._threads.map(attempt, self.ranks))

    def _built(self, start) -> Rank:
        rank = Rank(start, self._meeting)
        self._groups.append(rank.groups)
        return rank

    def _load(self, rank: Rank) -> Loaded:
        return rank.load(self.folder, lambda _done, _total: None)

    def step(self, rows) -> Sampled:
        """Runs a step on all ranks; they must agree."""
        answers = self.each(lambda rank: rank.step(rows))
        assert all(isinstance(one, Sampled) for one in answers), answers
        # Each rank tells of its own pages, once they have changed.
        first, *others = (msgspec.structs.replace(one, page_kind="") for one in answers)
        assert all(other == first for other in others), others
        return first

    def tokens(self, prompts, count: int = 10) -> list[list[int]]:
        """Answers prompts one by one, then goes on with all of them together."""
        sequences = [Sequence(p, first_block=8 * n) for n, p in enumerate(prompts)]
        for sequence in sequences:
            sequence.take(self.step((sequence.row(),)).tokens[0])
        for _ in range(count):
            self.decode(sequences)
        return [sequence.output for sequence in sequences]

    def decode(self, sequences: list[Sequence]) -> None:
        """Decodes one token of each sequence, in one batch."""
        sampled = self.step(tuple(sequence.row() for sequence in sequences))
        for sequence, token in zip(sequences, sampled.tokens, strict=True):
            sequence.take(token)

    def stage(self, layer: int, slots: Slots) -> list:
        """Stages a layer on all ranks, as the front does; returns their answers."""
        old, digests = self.map.layers[layer], self.digests()
        planned = moves(old, slots)

        def work(rank: Rank):
            group, part = rank.shard.experts.rank, rank.shard.rank
            wanted = {
                move.expert: digests[move.source * self.tp + part][
                    f"layer.{layer}.expert.{move.expert}"
                ]
                for move in planned
                if move.target == group
            }
            return rank.experts.stage(layer, slots, wanted)

        return self.each(work)

    def move(self, layer: int, slots: Slots) -> None:
        """Moves a layer's experts on all ranks."""
        for answers in (self.stage(layer, slots), self.each(lambda rank: rank.experts.move())):
            assert not any(isinstance(answer, Exception) for answer in answers), answers

    def lose(self, *groups: int) -> None:
        """Has groups of ranks go; the others find out at what they compute next."""
        for rank in self.ranks:
            if rank.shard.experts.rank in groups:
                rank.part()
        self.ranks = [rank for rank in self.ranks if rank.shard.experts.rank not in groups]

    def rejoin(self, name: str) -> list:
        """Has the ranks that are left meet anew, numbered in their order."""
        return self.numbered(lambda rank, number: rank.rejoin(
            Rejoin(name, number, len(self.ranks))))  # fmt: skip

    def place(self, experts: ExpertMap, *, routes: bool = False) -> None:
        """Has all ranks follow a map, and capture."""
        placed = self.numbered(lambda rank, number: rank.experts.place(
            Place(experts, number, routes)))  # fmt: skip
        assert all(isinstance(one, Placed) for one in placed), placed
        assert [one.manifest.rank for one in placed] == list(range(len(self.ranks)))
        assert [one.manifest for one in placed] == [r.arena.manifest for r in self.ranks]
        captured = self.each(Rank.capture)
        assert captured == [None] * len(self.ranks), captured

    def numbered(self, work) -> list:
        """Does something with every rank and its number at once."""
        numbers = {id(rank): number for number, rank in enumerate(self.ranks)}
        return self.each(lambda rank: work(rank, numbers[id(rank)]))

    def digests(self) -> list[dict[str, tuple[bytes, ...]]]:
        """Returns the digests of every unit as its bytes are now, by rank and name."""
        return [{unit.name: unit.digests for unit in self.units(rank)} for rank in self.ranks]

    def units(self, rank: Rank) -> tuple[Unit, ...]:
        """Returns the units of a rank with digests of their bytes."""
        return rank.arena.digested().units

    @property
    def map(self):
        """Where the experts lie; all ranks must agree."""
        first, *others = [rank.shard.experts.map for rank in self.ranks]
        assert all(other == first for other in others)
        return first


def alone(folder: Path, prompts, count: int = 10, **settings) -> list[list[int]]:
    """Returns the tokens that one rank makes."""
    with Ranks(folder, **settings) as ranks:
        return ranks.tokens(prompts, count)
