"""Every family, in every format, over ranks placed in every way: from disk and through the relay.

A cell of `matrix.py` is an instance that was loaded from disk, a dummy placed alike that the
relay fills from it, and a dummy placed otherwise that it fills from it. Both must become what an
instance placed like them is that was loaded from disk: to the byte on every rank, and to the
token. Tokens themselves are held against transformers elsewhere (`test_families`).
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import oracles
import pytest
import torch
from attached import Host
from format_cases import serves
from matrix import PLACES, SPARSE, Cell, Placed, sample, sizes, sparse, table
from rank_threads import Ranks
from tiny_llama import start_message

from engine_service.core.messages import Start
from engine_service.device.config import ModelConfig, parse_config
from engine_service.device.formats.layouts import LAYOUTS
from engine_service.device.plan import plan
from engine_service.device.rank import Rank
from engine_service.errors import ConfigError, UnsupportedModel
from relay_service.core.dtypes import DType
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.pull_report import PullReport
from relay_service.errors import FormatMismatch

PROMPTS = ([5], [(7 * i) % 251 for i in range(20)])
TOKENS = 3
CELLS = table()
SAMPLE = sample(CELLS)


class Loaded(NamedTuple):
    """An instance that was loaded from disk: its memory, and what became of it."""

    ranks: Ranks
    manifests: list[Manifest]
    """With digests of the bytes as they lie."""
    probe: bytes
    tokens: list[list[int]]


class Models:
    """Random models, and instances of one family in one format by how they are placed."""

    def __init__(self, folder_of: Callable[[str], Path]) -> None:
        self._folder_of = folder_of
        self._folders: dict[str, Path] = {}
        self._loaded: dict[str, Loaded] = {}
        self._kind = ("", "")

    def folder(self, family: str) -> Path:
        """Returns a checkpoint of the family."""
        if family not in self._folders:
            made = oracles.make(family, self._folder_of("matrix"), **sizes(family))
            self._folders[family] = made.folder
        return self._folders[family]

    def ranks(self, cell: Cell, place: str, *, dummy: bool = False) -> Ranks:
        """Returns ranks that serve the cell's family in its format."""
        placed, folder = PLACES[place], self.folder(cell.family)
        return Ranks(
            folder, placed.tp, placed.ep, dummy=dummy, dtype=cell.dtype, weight_format=cell.held,
            **placed.settings(self._config(cell.family)),
        )  # fmt: skip

    def start(self, family: str, placed: Placed, **settings) -> Start:
        """Returns the command that starts the first rank of a family, placed so."""
        return start_message(
            self.folder(family), world_size=placed.tp * placed.ep,
            expert_parallel_size=placed.ep, **placed.settings(self._config(family)), **settings,
        )  # fmt: skip

    def loaded(self, cell: Cell, place: str) -> Loaded:
        """Returns the instance that is placed so, loaded once while cells of its kind follow."""
        kind = cell.family, cell.held
        if kind != self._kind:
            self.close()
            self._kind = kind
        if place not in self._loaded:
            self._loaded[place] = self._load(cell, place)
        return self._loaded[place]

    def close(self) -> None:
        """Frees all instances."""
        while self._loaded:
            self._loaded.popitem()[1].ranks.free()

    def _config(self, family: str) -> ModelConfig:
        return parse_config((self.folder(family) / "config.json").read_bytes())

    def _load(self, cell: Cell, place: str) -> Loaded:
        with self.ranks(cell, place) as ranks:
            probes = {answer.probe for answer in ranks.each(Rank.record_probe)}
            assert len(probes) == 1
            return Loaded(ranks, _digested(ranks), probes.pop(), ranks.tokens(PROMPTS, TOKENS))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    """Random models; those that a format cannot serve here are never loaded."""
    made = Models(tmp_path_factory.mktemp)
    yield made
    made.close()


def _digested(ranks: Ranks) -> list[Manifest]:
    return [rank.arena.digested() for rank in ranks.ranks]


def _addresses(ranks: Ranks) -> list[list[int]]:
    """Returns where each weight lies that a pass reads, by rank."""
    return [
        [
            tensor.data_ptr()
            for stage in (rank.model.embedding, *rank.model.layers, rank.model.head)
            for tensor in stage.weights()
        ]
        for rank in ranks.ranks
    ]


def _parameter(cell: Cell):
    marks = [] if cell in SAMPLE else [pytest.mark.full]
    if not serves(cell.held, getattr(torch, cell.dtype)):
        marks.append(pytest.mark.skip(reason="not on this processor"))
    return pytest.param(cell, id="-".join(cell).replace(", ", "-"), marks=marks)


@pytest.mark.parametrize("cell", [_parameter(cell) for cell in CELLS])
async def test_a_target_is_what_was_loaded_from_disk(models, cell):
    """Filled by a copy, and filled with weights that are cut anew, or refused with the reason."""
    seed = models.loaded(cell, cell.placed)
    with Host() as host:
        host.seed("seed", seed.ranks, seed.ranks.loaded, seed.probe)
        report = await _filled(models, host, cell, cell.placed)
        assert report.path[0].recut == ""
        assert report.weights_digest == weights_digest(seed.manifests)
        if cell.sealed:
            await _refused(models, host, cell)
            return
        report = await _filled(models, host, cell, cell.other)
        assert report.path[0].recut
        assert report.source_weights_digest == weights_digest(seed.manifests)
        if cell.held == "plain":  # others may be cut where nothing is rounded alike
            assert models.loaded(cell, cell.other).tokens == seed.tokens


async def _filled(models: Models, host: Host, cell: Cell, place: str) -> PullReport:
    """Fills a dummy; compares it with an instance placed like it that was loaded from disk."""
    expected, seed = models.loaded(cell, place), models.loaded(cell, cell.placed)
    with models.ranks(cell, place, dummy=True) as ranks:
        target, before = host.dummy(place, ranks), _addresses(ranks)
        assert _digested(ranks) != expected.manifests
        report = await host.fill(target)
        assert [(one.source_instance, one.reason) for one in report.path] == [("seed", "complete")]
        assert report.probe == seed.probe
        assert _digested(ranks) == expected.manifests
        assert not any(ranks.each(lambda rank: rank.arena.seal()))
        probe = seed.probe if cell.exact else expected.probe
        assert not any(ranks.each(lambda rank: rank.check_probe(probe)))
        host.commit(target, report)
        assert target.manifests == expected.manifests
        assert ranks.tokens(PROMPTS, TOKENS) == expected.tokens
        assert _addresses(ranks) == before
        host.leave(target)
    ranks.free()
    return report


async def _refused(models: Models, host: Host, cell: Cell) -> None:
    """No byte of a dummy changes, whose ranks cannot be cut out of the seed's."""
    with models.ranks(cell, cell.other, dummy=True) as ranks:
        target, before = host.dummy(cell.other, ranks), _digested(ranks)
        with pytest.raises(FormatMismatch, match=cell.sealed):
            await host.fill(target)
        assert _digested(ranks) == before
        host.leave(target)
    ranks.free()


# What is no cell

NO_PLACE = {
    Placed(3): "2 heads cannot be split over 3 ranks",
    Placed(1, 5): "experts cannot be spread evenly over 5 groups",
}  # fmt: skip
NO_EXPERTS = dict.fromkeys([Placed(1, 5), *SPARSE.values()], "the model has no experts")


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_what_cannot_be_placed_is_refused(models, family):
    """Before anything is allocated, with the numbers."""
    for placed, words in (NO_PLACE if sparse(family) else NO_PLACE | NO_EXPERTS).items():
        with pytest.raises(UnsupportedModel, match=words):
            plan(models.start(family, placed))


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_what_cannot_be_held_is_refused(models, family):
    """A format that doesn't serve a type says which ones it serves."""
    types = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
    refused = [
        (layout, dtype) for layout in LAYOUTS.values() for dtype in types
        if types[dtype] not in layout.types
    ]  # fmt: skip
    assert ("packed", "float32") in [(layout.name, dtype) for layout, dtype in refused]
    for layout, dtype in refused:
        needed = " or ".join(sorted(layout.types))
        words = f"{layout.name} cannot serve {types[dtype]} on cpu here: it needs {needed}"
        with pytest.raises(ConfigError, match=words):
            plan(models.start(family, Placed(), dtype=dtype, weight_format=layout.name))


def test_the_sample_has_every_pair():
    """Of format, how the seed is placed, and how the other is; and every family, in few cells."""
    cells = [cell for cell in CELLS if "," not in cell.family]
    assert {pair for cell in cells for pair in combinations(enumerate(cell[1:]), 2)} == {
        pair for cell in SAMPLE for pair in combinations(enumerate(cell[1:]), 2)
    }
    assert {cell.family for cell in SAMPLE} == {cell.family for cell in cells}
    assert len(set(CELLS)) == len(CELLS) > 6 * len(SAMPLE)
