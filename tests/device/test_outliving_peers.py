"""Ranks that outlive others: they meet anew, follow the map of those left, and compute on."""

import time
from pathlib import Path

import pytest
import torch
from oracles import make
from rank_threads import Ranks, alone
from tiny_llama import Sequence

from engine_service.core.member_messages import Place, Rejoin
from engine_service.core.update_messages import DropStaging, FinishStaging, OpenStaging, ProveStaged
from engine_service.device.parallel import Group, Groups, all_largest, rehearsing
from engine_service.device.rank import Rank
from engine_service.errors import ArenaError, CollectiveFailed, ConfigError, WrongState

PROMPTS = ([3, 1, 4, 1, 5], [(7 * i) % 199 for i in range(20)], [9, 8])
EXPERTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a dense layer and two with eight experts each, and shared ones."""
    return make("dots1", tmp_path_factory.mktemp("dots1"), num_key_value_heads=4).folder


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens that one rank makes."""
    return alone(folder, PROMPTS)


def _fresh(folder, tp, ep, experts, **settings):
    """Returns the tokens of an instance that starts with a map."""
    redundant = ep * len(experts.layers[1][0]) - EXPERTS
    settings |= {"redundant_experts": redundant, "expert_map": experts.layers}
    with Ranks(folder, tp, ep, **settings) as ranks:
        return ranks.tokens(PROMPTS)


def _begun(ranks):
    sequences = [Sequence(p, first_block=8 * n) for n, p in enumerate(PROMPTS)]
    for sequence in sequences:
        sequence.take(ranks.step((sequence.row(),)).tokens[0])
    return sequences


def _find_out(rank):
    """A rank computes what others do not, and leaves those that are left, as its worker does.

    Whoever isn't next to the lost one learns of it by that.
    """
    try:
        rank.step((Sequence([1, 2, 3], 24).row(),))
    except CollectiveFailed as error:
        lost = "has gone" in str(error)
    rank.part()
    return lost


def _outlive(ranks, groups, name="after"):
    """The rest of an instance that lost groups of ranks."""
    experts = ranks.map.without(groups)
    ranks.lose(*groups)
    assert all(ranks.each(_find_out))
    assert ranks.rejoin(name) == [None] * len(ranks.ranks)
    ranks.place(experts)
    return experts


@pytest.mark.parametrize(
    ("tp", "ep", "redundant", "lost", "weight_format"),
    [
        (1, 4, 8, [0, 3], "plain"),
        (2, 2, 8, [1], "int8"),
        pytest.param(1, 4, 8, [1], "plain", marks=pytest.mark.full),
        pytest.param(1, 4, 8, [0], "plain", marks=pytest.mark.full),
        pytest.param(2, 2, 8, [0], "plain", marks=pytest.mark.full),
        pytest.param(1, 2, 8, [0], "plain", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_those_left_are_an_ordinary_instance(
    folder, expected, tp, ep, redundant, lost, weight_format
):
    """They go on in mid-stream, and compute what fresh ranks with their map do."""
    held = {"weight_format": weight_format}
    wanted = expected if weight_format == "plain" else alone(folder, PROMPTS, **held)
    with Ranks(folder, tp, ep, redundant_experts=redundant, **held) as ranks:
        own = {id(rank): rank.arena.address for rank in ranks.ranks}
        read = [rank.arena.tensors["embed"].data_ptr() for rank in ranks.ranks]
        sequences = _begun(ranks)
        for _ in range(4):
            ranks.decode(sequences)
        experts = _outlive(ranks, lost)
        assert not experts.lost
        for _ in range(6):
            ranks.decode(sequences)
        assert [sequence.output for sequence in sequences] == wanted
        assert ranks.tokens(PROMPTS) == wanted
        assert _fresh(folder, tp, ep - len(lost), experts, **held) == wanted
        assert all(rank.arena.address == own[id(rank)] for rank in ranks.ranks)
        assert {rank.arena.tensors["embed"].data_ptr() for rank in ranks.ranks} < set(read)


def test_one_loss_after_another(folder, expected):
    """Each time under another name; at last one rank computes alone."""
    with Ranks(folder, 1, 3, redundant_experts=16) as ranks:
        _outlive(ranks, [1], "first")
        _outlive(ranks, [0], "second")
        assert ranks.tokens(PROMPTS) == expected
        (last,) = ranks.ranks
        assert last.groups.world.ranks == 1


def test_a_meeting_that_somebody_misses(folder, expected):
    """It ends in time, computes nothing until the next one, and that one works."""
    with Ranks(folder, 1, 3, redundant_experts=16, collective_timeout_seconds=2) as ranks:
        experts = ranks.map.without([2])
        ranks.lose(2)
        ranks.each(Rank.part)

        def missing(rank, number):
            return rank.rejoin(Rejoin("three", number, 3))

        began = time.monotonic()
        answers = ranks.numbered(missing)
        assert all(isinstance(one, CollectiveFailed) for one in answers), answers
        assert time.monotonic() - began < 20
        for rank in ranks.ranks:
            rank.capture()  # needs nobody, and makes nobody come
            assert isinstance(_error(lambda r=rank: r.record_probe()), CollectiveFailed)
            assert isinstance(
                _error(lambda r=rank: r.step((Sequence([1]).row(),))), WrongState
            )  # fmt: skip
        assert ranks.rejoin("two") == [None, None]
        ranks.place(experts)
        assert ranks.tokens(PROMPTS) == expected


def _error(work):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the test looks at its kind
        work()
    return caught.value


def test_nothing_is_computed_before_all_have_captured(folder):
    """What was captured before is void, also where a rank needs nobody else."""
    with Ranks(folder, 1, 2, redundant_experts=8) as ranks:
        experts = ranks.map.without([0])
        ranks.lose(0)
        assert ranks.rejoin("one") == [None]
        (rank,) = ranks.ranks
        row = (Sequence([1, 2, 3]).row(),)
        assert isinstance(_error(lambda: rank.step(row)), WrongState)
        rank.experts.place(Place(experts, 0))
        assert isinstance(_error(lambda: rank.step(row)), WrongState)
        rank.capture()
        rank.step(row)


def test_what_was_captured_follows_those_who_meet(folder, expected):
    """Nobody captures again, save who adds the shared experts by now."""
    with Ranks(folder, 1, 3, redundant_experts=16) as ranks:
        captured = []
        for rank in ranks.ranks:
            again, number = rank.graphs.capture, rank.shard.experts.rank
            rank.graphs.capture = lambda a=again, n=number: (captured.append(n), a())
        _outlive(ranks, [1], "first")
        assert ranks.tokens(PROMPTS) == expected
        assert captured == []
        _outlive(ranks, [0], "second")
        assert ranks.tokens(PROMPTS) == expected
        assert captured == [2]


def test_a_rehearsal_needs_nobody():
    """Collectives come out as among ranks that are alike, and fail again afterwards."""
    groups = Groups.lonely()
    groups.follow(Groups(Group(1, 2), Group(3, 4)))
    data = torch.tensor([[1.0, 2.0]])
    with rehearsing(groups):
        assert groups.world.all_reduce(data).tolist() == [[4.0, 8.0]]
        assert groups.tensor.gather(data).tolist() == [[1.0, 2.0, 1.0, 2.0]]
        assert all_largest(data, groups.world.name).tolist() == data.tolist()
    with pytest.raises(CollectiveFailed):
        groups.world.all_reduce(data)


def test_connections_to_those_before_are_closed(folder):
    """A rank that meets others again and again holds no more descriptors than at first."""
    with Ranks(folder, 1, 2, redundant_experts=8) as ranks:
        ranks.rejoin("first")
        before = _descriptors()
        for name in ("second", "third", "fourth"):
            assert ranks.rejoin(name) == [None, None]
        assert _descriptors() <= before


def _descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_shared_experts_are_added_once(folder):
    """By the first group of those left, whichever it was before."""
    with Ranks(folder, 1, 3, redundant_experts=16) as ranks:
        layer = ranks.ranks[1].model.layers[1]
        normed = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
        found = ranks.each(lambda rank: rank.model.layers[1].feed_forward(normed))
        _outlive(ranks, [0])
        again = ranks.each(lambda rank: rank.model.layers[1].feed_forward(normed))
        assert layer.shared_gate_up is not None
        assert torch.allclose(found[1], again[0], atol=1e-5)


# What cannot be


@pytest.mark.parametrize(("number", "size"), [(1, 2), (0, 3), (4, 4)])
def test_a_number_that_cannot_be_this_ranks(folder, number, size):
    """The part of a rank stays; nothing is left then."""
    with Ranks(folder, 2, 2) as ranks:
        (rank, *_others) = ranks.ranks
        assert isinstance(_error(lambda: rank.rejoin(Rejoin("odd", number, size))), ConfigError)
        ranks.tokens(PROMPTS, 2)


def test_maps_that_cannot_be_followed(folder):
    """Of other groups or slots, of another number, or with experts that were never taken."""
    with Ranks(folder, 1, 4, redundant_experts=8) as ranks:
        (rank, *_others) = ranks.ranks
        whole = ranks.map
        before = ranks.digests()
        swapped = whole.changed({1: (whole.layers[1][1], whole.layers[1][0], *whole.layers[1][2:])})
        for command, error in [
            (Place(whole.without([0]), 0), ConfigError),
            (Place(whole, 4), ConfigError),
            (Place(type(whole)(8, {1: whole.layers[1]}), 0), ConfigError),
            (Place(swapped, 0), ArenaError),
        ]:
            assert isinstance(_error(lambda c=command: rank.experts.place(c)), error), command
        assert rank.arena.whole
        assert ranks.digests() == before
        assert ranks.map == whole
        rank.arena.begin()
        assert isinstance(_error(lambda: rank.experts.place(Place(whole, 0))), ArenaError)
        assert isinstance(_error(lambda: rank.rejoin(Rejoin("no", 0, 4))), WrongState)
        rank.arena.end()


def test_steps_wait_for_experts_that_nobody_holds(folder):
    """Unless rows pass over them."""
    with Ranks(folder, 1, 2) as ranks:
        experts = _outlive(ranks, [0])
        assert experts.lost == dict.fromkeys((1, 2), (0, 1, 2, 3))
        row = (Sequence([1, 2, 3]).row(),)
        (rank,) = ranks.ranks
        assert isinstance(_error(lambda: rank.step(row)), WrongState)
        ranks.place(experts, routes=True)
        rank.step(row)


def test_what_is_staged_does_not_outlive(folder):
    """Its update is over; the next one proves in groups of those left, whatever was proven."""
    with Ranks(folder, 1, 3, redundant_experts=16) as ranks:
        serves = [rank.arena.digested() for rank in ranks.ranks]

        def staged(rank):
            rank.staging.answer(OpenStaging(serves=serves[rank.arena.manifest.rank]))
            rank.staging._stage.disk(folder, 0, lambda *_: None)
            rank.staging.answer(FinishStaging())
            rank.staging.answer(ProveStaged())

        assert ranks.each(staged) == [None] * 3
        ranks.ranks[2].staging._proofs = 7
        _outlive(ranks, [1])
        serves = [rank.arena.digested() for rank in ranks.ranks]
        answers = ranks.each(lambda rank: rank.staging.apply())
        assert all(isinstance(one, WrongState) for one in answers), answers
        assert ranks.each(staged) == [None] * 2
        ranks.each(lambda rank: rank.staging.answer(DropStaging()))
