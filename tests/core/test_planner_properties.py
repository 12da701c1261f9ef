"""Plans between any two ways to cut a model, against cutting the model directly."""

import re
from collections.abc import Iterator

import pytest
from cutting import carry_out, contents, matrices, placements
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.holder import Holder
from relay_service.core.manifest import TensorEntry
from relay_service.core.planner import Planner
from relay_service.errors import PartsMissing


def tensors(one: Holder) -> Iterator[TensorEntry]:
    """Yields the tensors of a rank."""
    return (entry for unit in one.manifest.units for entry in unit.tensors)


def cells(ranks: list[Holder]) -> set[tuple[str, int, int]]:
    """Returns every element of logical tensors that these ranks hold."""
    parts = [part for one in ranks for entry in tensors(one) for part in entry.cut.parts]
    return {
        (part.logical, row, column)
        for part in parts
        for row in range(part.rows[0], sum(part.rows))
        for column in range(part.columns[0], sum(part.columns))
    }


def named(missing: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
    """Yields every element that an error names."""
    for words in missing:
        found = re.fullmatch(
            r"m\d+: (.+): rows (\d+)\.\.(\d+) of \d+(?:, columns (\d+)\.\.(\d+) of \d+)?", words
        )
        assert found, words
        top, bottom, left, right = (int(number or 0) for number in found.groups()[1:])
        for row in range(top, bottom + 1):
            yield from ((found[1], row, column) for column in range(left, right + 1))


@given(st.data(), matrices)
def test_a_plan_cuts_like_the_model_itself(data, model):
    """Whatever the cuts, every byte is written once, with that of the logical tensor."""
    sources = data.draw(placements(model)) + data.draw(st.just([]) | placements(model))
    planner, arenas = Planner(sources), [contents(one) for one in sources]
    for target in data.draw(placements(model)):
        filled = carry_out(planner.plan(target), arenas, target.manifest.data_bytes)
        assert filled == contents(target)


@given(st.data(), matrices)
def test_what_dead_ranks_held_is_missing(data, model):
    """Without some ranks a plan is as good, or the error names just what nobody holds."""
    ranks = data.draw(placements(model))
    dead = data.draw(st.sets(st.sampled_from(range(len(ranks)))))
    sources = [one for number, one in enumerate(ranks) if number not in dead]
    for target in data.draw(placements(model)):
        missing = cells([target]) - cells(sources)
        planner = Planner(sources)
        if missing:
            with pytest.raises(PartsMissing) as refused:
                planner.plan(target)
            found = list(named(refused.value.missing))
            assert set(found) == missing
            assert len(found) == len(missing)
        else:
            arenas = [contents(one) for one in sources]
            filled = carry_out(planner.plan(target), arenas, target.manifest.data_bytes)
            assert filled == contents(target)


@given(st.data(), matrices)
def test_the_same_placement_is_copied_unit_by_unit(data, model):
    """A rank that another one equals is filled with one run per unit, none for an empty one."""
    ranks = data.draw(placements(model))
    for target in ranks:
        plan = Planner(ranks).plan(target)
        units = [unit for unit in target.manifest.units if unit.nbytes]
        assert [(c.unit, c.target_offset, c.nbytes, c.count) for c in plan] == [
            (unit.name, unit.offset, unit.nbytes, 1) for unit in units
        ]


@given(st.data(), matrices)
def test_a_rank_that_holds_everything_gives_a_run_per_part(data, model):
    """From one whole rank nothing is cut into more copies than there are parts."""
    (whole,) = data.draw(placements(model, most=1))
    for target in data.draw(placements(model)):
        parts = sum(len(entry.cut.parts) for entry in tensors(target))
        assert len(Planner([whole]).plan(target)) <= parts
