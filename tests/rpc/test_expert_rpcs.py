"""Experts are shown and moved over real sockets, between the steps of an engine without a model."""

import asyncio

import pytest
from engines import FakeRanks, tokens
from experts import EXPERTS, GROUPS, LAYERS, PARTS, fresh, layout, spread
from fakes import eventually

from clients.errors import CallFailed
from engine_service.core.expert_map import RankExperts, moves
from engine_service.core.expert_messages import (
    DropExperts,
    ExpertsMoved,
    MoveExperts,
    Staged,
    StageExperts,
)
from engine_service.core.messages import Done
from engine_service.errors import ArenaError, RankDied
from relay_service.core.instance import State
from relay_service.core.manifest import weights_digest
from seedrelay.v1 import engine_pb2

NEW = ((3, 1, 2), (0, 1, 3))


class FakeExperts(FakeRanks):
    """Ranks that move nothing, but say so."""

    def __init__(self, instance) -> None:
        super().__init__()
        self.instance = instance
        self.asked = []
        self.failing: dict[type, Exception] = {}
        self.moving = asyncio.Event()
        self.may_move = asyncio.Event()
        self.may_move.set()
        self.layer = None

    async def all(self, commands, kind):
        """Stages, unless it fails at layer 2."""
        self.asked.append(commands[0])
        if isinstance(commands[0], StageExperts):
            if commands[0].layer == 2 and StageExperts in self.failing:
                raise self.failing[StageExperts]
            self.layer = commands[0]
            return [Staged(64 * len(command.digests)) for command in commands]
        raise AssertionError(commands)

    async def in_time(self, command, _kind, _seconds):
        """Drops or moves what was staged."""
        self.asked.append(command)
        if isinstance(command, DropExperts):
            return [Done()] * (GROUPS * PARTS)
        assert isinstance(command, MoveExperts)
        self.moving.set()
        await self.may_move.wait()
        if MoveExperts in self.failing:
            raise self.failing[MoveExperts]
        placed = self.instance.experts.changed({self.layer.layer: self.layer.slots})
        return [
            ExpertsMoved(
                tuple(
                    unit
                    for unit in layout(RankExperts(placed, rank // PARTS), rank).units
                    if unit.name.startswith(f"layer.{self.layer.layer}.")
                )
            )
            for rank in range(GROUPS * PARTS)
        ]


@pytest.fixture
def experts(service):
    """The service with experts on two groups of two ranks, one of them twice in each layer."""
    instance = service.instance
    ranks = FakeExperts(instance)
    instance.ranks = service.ranks = ranks
    instance.engine._runner = ranks
    spread(instance)
    return service


def _layer(number: int, slots) -> engine_pb2.LayerExperts:
    groups = [engine_pb2.GroupExperts(experts=held) for held in slots]
    return engine_pb2.LayerExperts(layer=number, groups=groups)


def _slots(message: engine_pb2.LayerExperts):
    return tuple(tuple(group.experts) for group in message.groups)


async def test_where_experts_lie(experts):
    """By layer, group and slot, with a digest of each that differs from any other's."""
    found = await experts.client.expert_map()
    assert (found.map.expert_count, found.epoch) == (EXPERTS, 1)
    assert [(one.layer, _slots(one)) for one in found.map.layers] == [
        (layer, ((0, 1, 2), (3, 0, 1))) for layer in LAYERS
    ]
    placement = found.map.placement
    assert (placement.tensor_parallel_size, placement.expert_parallel_size) == (PARTS, GROUPS)
    assert (placement.redundant_experts, placement.expert_map) == (
        2,
        experts.instance.experts.digest,
    )
    digests = {digest for one in found.map.layers for digest in one.digests}
    assert len(digests) == len(LAYERS) * EXPERTS
    assert [one.layer for one in (await experts.client.expert_map([2])).map.layers] == [2]


async def test_a_change_of_the_map(experts):
    """The reply, the manifests and the epoch follow it; what each expert is stays the same."""
    before = (await experts.client.expert_map()).map
    done = await experts.client.set_expert_map([_layer(n, NEW) for n in LAYERS])
    moved = len(moves(((0, 1, 2), (3, 0, 1)), NEW))
    assert (done.layers_changed, done.experts_moved, done.epoch) == (2, 2 * moved, 3)
    assert done.bytes_moved == 2 * PARTS * moved * 64
    after = (await experts.client.expert_map()).map
    assert after == done.map
    assert [_slots(one) for one in after.layers] == [NEW, NEW]
    assert [one.digests for one in after.layers] == [one.digests for one in before.layers]
    instance = experts.instance
    assert instance.manifests == fresh(instance.experts)
    assert done.weights_digest == weights_digest(instance.manifests)
    assert instance.engine.weights.digest == done.weights_digest
    assert instance.placement.expert_map == instance.experts.digest
    asked = len(experts.ranks.asked)
    again = await experts.client.set_expert_map([_layer(1, NEW)])
    assert (again.layers_changed, again.epoch, len(experts.ranks.asked)) == (0, 3, asked)


async def test_streams_go_on_and_kv_stays(experts):
    """No step runs while experts are put into place; no KV is computed again."""
    prompt = tuple(range(20))
    await experts.answer(**tokens(*prompt))
    experts.ranks.may_move.clear()
    experts.ranks.gate.clear()
    experts.ranks.stepping.clear()
    reading = asyncio.create_task(experts.answer(**tokens(1, max_tokens=40)))
    await experts.ranks.stepping.wait()
    changing = asyncio.create_task(experts.client.set_expert_map([_layer(1, NEW)]))
    await eventually(lambda: experts.ranks.asked)
    assert not experts.ranks.moving.is_set(), "a step was running"
    experts.ranks.gate.set()
    await experts.ranks.moving.wait()
    steps = len(experts.ranks.steps)
    for _ in range(20):
        await experts.client.status()
    assert len(experts.ranks.steps) == steps
    experts.ranks.may_move.set()
    await changing
    chunks = await reading
    assert [t for chunk in chunks for t in chunk.token_ids] == list(range(2, 42))
    spans = chunks[-1].version_spans
    assert [(span.weight_version, span.epoch) for span in spans] == [("v1", 1), ("v1", 2)]
    *_, last = await experts.answer(**tokens(*prompt))
    assert last.usage.cached_tokens == 16


async def test_a_layer_that_cannot_be_staged(experts):
    """It stays as it was, and the error says what was moved before; what is staged is dropped."""
    experts.ranks.failing[StageExperts] = ArenaError("expert 3 is rotten", tensor="x")
    with pytest.raises(CallFailed) as failed:
        await experts.client.set_expert_map([_layer(n, NEW) for n in LAYERS])
    assert failed.value.message == (
        "layer 2 stays as it was, and 1 before it were moved: expert 3 is rotten"
    )
    assert (failed.value.reason, failed.value.details["tensor"]) == ("ArenaError", "x")
    found = await experts.client.expert_map()
    assert [_slots(one) for one in found.map.layers] == [NEW, ((0, 1, 2), (3, 0, 1))]
    assert (found.epoch, experts.instance.manifests) == (2, fresh(experts.instance.experts))
    assert isinstance(experts.ranks.asked[-1], DropExperts)
    del experts.ranks.failing[StageExperts]
    assert (await experts.client.set_expert_map([_layer(2, NEW)])).layers_changed == 1


async def test_ranks_are_lost_between_two_steps_of_a_move(experts):
    """What is staged for ranks that were is not put into those that are."""
    instance, ranks = experts.instance, experts.ranks
    async with instance.engine.between_steps():
        changing = asyncio.create_task(experts.client.set_expert_map([_layer(1, NEW)]))
        await eventually(lambda: ranks.asked)
        instance.experts = instance.experts.without([0])
    with pytest.raises(CallFailed, match="ranks were lost") as failed:
        await changing
    assert failed.value.code == "UNAVAILABLE"
    assert not ranks.moving.is_set()


async def test_a_rank_that_dies_is_told(experts):
    """Nothing is dropped or tried again: the instance is over."""
    experts.ranks.failing[MoveExperts] = RankDied("rank 1 has died")
    with pytest.raises(CallFailed, match="rank 1 has died") as failed:
        await experts.client.set_expert_map([_layer(1, NEW)])
    assert failed.value.code == "UNAVAILABLE"
    assert [type(one) for one in experts.ranks.asked] == [StageExperts, MoveExperts]
    assert experts.instance.engine.weights.epoch == 1


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "no layer is named"),
        ([_layer(1, NEW), _layer(1, NEW)], "layer 1 stands twice"),
        (
            [_layer(0, NEW), _layer(2, ((0, 1, 1), (3, 0, 9)))],
            r"layer 0 has no experts; .* expert 1 is there 2 times; .* no expert 9; .* holds 2$",
        ),
    ],
)
async def test_a_map_that_is_wrong(experts, layers, words):
    """All of it is listed, and no rank is asked anything."""
    with pytest.raises(CallFailed, match=words) as refused:
        await experts.client.set_expert_map(layers)
    assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert (experts.ranks.asked, experts.instance.engine.weights.epoch) == ([], 1)
    with pytest.raises(CallFailed, match="layer 7 has no experts"):
        await experts.client.expert_map([7])


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
async def test_experts_are_moved_while_it_serves(experts, state):
    """In no other state."""
    experts.enter(state)
    with pytest.raises(CallFailed, match=f"one is {state}") as refused:
        await experts.client.set_expert_map([_layer(1, NEW)])
    assert (refused.value.code, experts.ranks.asked) == ("FAILED_PRECONDITION", [])


async def test_a_caller_that_leaves_ends_nothing(experts):
    """What has begun is done, and the next change waits for it."""
    experts.ranks.may_move.clear()
    leaves = asyncio.create_task(experts.client.set_expert_map([_layer(n, NEW) for n in LAYERS]))
    await experts.ranks.moving.wait()
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    back = asyncio.create_task(experts.client.set_expert_map([_layer(1, ((0, 1, 2), (3, 0, 1)))]))
    experts.ranks.may_move.set()
    assert (await back).epoch == 4
    await eventually(lambda: experts.instance.experts.layers[2] == NEW)


async def test_a_model_without_experts(service):
    """Has no map to show or change."""
    for call in (service.client.expert_map(), service.client.set_expert_map([_layer(1, NEW)])):
        with pytest.raises(CallFailed, match="serves no experts") as refused:
            await call
        assert refused.value.code == "FAILED_PRECONDITION"
