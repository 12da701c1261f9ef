"""What follows when ranks are lost: who lives, what is held, what is brought back, and from where.

Over ranks that are small fakes with real memory; the real ones stand in `tests/e2e`.
"""

import asyncio

import pytest
from elastic import LAYERS, Elastic
from fakes import eventually, resources

from engine_service.core.member_messages import Beat, Place, Rejoin, TakeUnits
from engine_service.core.membership import MembershipState, RecoverOptions
from engine_service.core.messages import Done
from engine_service.core.step_messages import Step
from engine_service.errors import (
    InvalidRequest,
    NotReady,
    RankDied,
    RanksLost,
    RecoveryFailed,
    WrongState,
)
from relay_service.core.instance import State
from relay_service.core.manifest import weights_digest

WHOLE, HELD, ROUTED = MembershipState.WHOLE, MembershipState.HELD, MembershipState.ROUTED


@pytest.fixture
async def elastic():
    """Makes instances, and ends them."""
    before, made = resources(), []

    def make(*sizes, **settings) -> Elastic:
        made.append(Elastic(*sizes, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.close()
    made.clear()
    assert resources().descriptors <= before.descriptors


def hang(rank) -> None:
    """As by SIGSTOP."""
    rank.hangs = True


def die(rank) -> None:
    """As by SIGKILL."""
    rank.die()


def names(report) -> list[str]:
    """Returns the pull list."""
    return sorted(one.unit for one in report.pulled)


async def whole(one: Elastic, groups: int) -> None:
    """Waits until so many groups hold everything."""
    await eventually(
        lambda: (
            one.instance.experts.groups == groups
            and one.instance.membership.state is WHOLE
            and one.instance.lifecycle.state is State.READY
        )
    )


def is_sound(one: Elastic) -> None:
    """What the instance says of its ranks is what they hold, and what they held before."""
    instance = one.instance
    assert weights_digest(instance.manifests) == instance.engine.weights.digest
    for rank, manifest in zip(one.ranks, instance.manifests, strict=True):
        for unit in manifest.units:
            assert rank.arena.view(unit.offset, unit.nbytes)
    assert [m.rank for m in instance.membership.members] == list(range(len(one.ranks)))
    assert [m.pid for m in instance.membership.members] == [rank.pid for rank in one.ranks]
    assert not instance.experts.lost


@pytest.mark.parametrize("loss", [die, hang])
@pytest.mark.parametrize("when", ["idle", "running"])
@pytest.mark.parametrize(
    ("experts", "groups", "parts", "redundant"), [(8, 4, 1, 0), (8, 4, 1, 4), (6, 3, 2, 3)]
)
async def test_a_rank_is_lost(elastic, loss, when, experts, groups, parts, redundant):
    """S67: just what no live rank holds comes from outside, and the tokens are the same."""
    one, healthy = (elastic(experts, groups, parts, redundant) for _ in range(2))
    expected = await healthy.tokens()
    streams = [asyncio.ensure_future(one.tokens()) for _ in range(8 if when == "running" else 0)]
    if streams:
        await eventually(lambda: len(one.instance.engine.scheduler.running) == 8)
    before, victim = one.instance.experts, one.ranks[parts]
    reports = []
    recover = one.supervisor.recovery.recover

    async def noted(*arguments):
        reports.append(await recover(*arguments))

    one.supervisor.recovery.recover = noted
    loss(victim)
    replaced = groups if redundant == 0 else groups - 1
    await eventually(lambda: bool(reports))
    await whole(one, replaced)
    is_sound(one)
    lost = before.without([1]).lost
    assert names(reports[0]) == sorted(f"layer.{n}.expert.{e}" for n in lost for e in lost[n])
    assert {p.part for p in reports[0].pulled} <= {0}, "a mate's part was still there"
    assert one.world.taken == names(reports[0]) or sorted(one.world.taken) == names(reports[0])
    for stream in streams:
        assert await stream == expected
    assert await one.tokens() == expected
    assert victim.has_ended


async def test_everything_has_a_replica(elastic):
    """Nothing is pulled, and nobody waits for it."""
    one = elastic(4, 2, redundant=4)
    expected = await one.tokens()
    one.ranks[0].die()
    await whole(one, 1)
    assert await one.tokens() == expected
    assert one.world.taken == []


async def test_degraded_until_told_otherwise(elastic):
    """Ranks that live serve what they hold; by hand, a rank is started in the lost one's place."""
    one = elastic(4, 2, redundant=4, on_rank_loss="degrade")
    expected = await one.tokens()
    one.ranks[0].die()
    await eventually(lambda: one.instance.membership.state is MembershipState.DEGRADED)
    assert one.instance.membership.groups_lost == 1
    assert await one.tokens() == expected
    report = await one.supervisor.recovery.recover(RecoverOptions(replace=True))
    assert (report.ranks_started, report.bytes_pulled, len(one.ranks)) == (1, 0, 2)
    is_sound(one)
    assert await one.tokens() == expected
    with pytest.raises(WrongState, match="no rank was lost"):
        await one.supervisor.recovery.recover(RecoverOptions())


async def test_held_until_it_is_back(elastic):
    """A request waits; an instance that holds too long fails, and says why."""
    one = elastic(8, 4, on_rank_loss="degrade")
    expected = await one.tokens()
    one.ranks[3].die()
    await eventually(lambda: one.instance.membership.state is HELD)
    assert one.instance.lifecycle.state is State.UPDATING
    assert one.instance.membership.lost == dict.fromkeys(LAYERS, (6, 7))
    waiting = asyncio.ensure_future(one.tokens())
    await one.supervisor.recovery.recover(RecoverOptions(source="disk"))
    assert await waiting == expected
    late = elastic(8, 4, on_rank_loss="degrade", recovery_deadline_seconds=0.2)
    late.ranks[0].die()
    await eventually(lambda: late.instance.membership.state is HELD)
    with pytest.raises(NotReady, match="did not come back in time"):
        await late.tokens()
    assert late.instance.lifecycle.state is State.FAILED


async def test_routed_past_what_is_lost(elastic):
    """Requests may do without some experts where that is allowed, and it is told."""
    one = elastic(8, 4, on_rank_loss="degrade", lost_experts="route")
    expected = await one.tokens()
    one.ranks[3].die()
    await eventually(lambda: one.instance.membership.state is ROUTED)
    assert one.instance.engine.degraded
    assert await one.tokens() != expected
    await one.supervisor.recovery.recover(RecoverOptions())
    assert not one.instance.engine.degraded
    assert await one.tokens() == expected, "KV of a degraded time was used"


async def test_no_process_can_be_started_to_stand_ready(elastic):
    """It would have saved time; nobody who is served notices."""
    one, asked = elastic(8, 4), []

    def full(count: int) -> None:
        asked.append(count)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    one.world.stand_ready = full
    expected = await one.tokens()
    await eventually(lambda: len(asked) > 2)
    assert set(asked) == {1}
    one.ranks[1].die()
    await whole(one, 4)
    assert await one.tokens() == expected


async def test_the_folder_holds_other_weights(elastic):
    """S67: what comes must be what was lost, of the current version; else it stays lost."""
    one = elastic(8, 4, on_rank_loss="degrade")
    one.world.disk_version = "v0"
    one.ranks[1].die()
    await eventually(lambda: one.instance.membership.state is HELD)
    before = one.instance.experts
    with pytest.raises(RecoveryFailed, match="other weights"):
        await one.supervisor.recovery.recover(RecoverOptions())
    assert one.instance.experts == before
    assert one.instance.membership.state is HELD
    assert len(one.ranks) == 3
    assert all(rank.has_ended for rank in one.world.started)


@pytest.mark.parametrize(
    ("loss", "command", "which"),
    [
        (die, TakeUnits, "a member"), (die, TakeUnits, "the fresh one"), (die, Step, "a member"),
        (die, Rejoin, "a member"), (die, Rejoin, "the fresh one"), (die, Step, "the fresh one"),
        (die, Place, "a member"), (die, Place, "the fresh one"), (hang, TakeUnits, "the fresh one"),
        (hang, Rejoin, "the fresh one"), (hang, Place, "a member"), (hang, Step, "a member"),
    ],
)  # fmt: skip
async def test_a_second_one_is_lost_meanwhile(elastic, loss, command, which):
    """At any point of a recovery: it is decided anew, and comes to a good end."""
    one, healthy = elastic(8, 4), elastic(8, 4)
    expected = await healthy.tokens()
    streams = [asyncio.ensure_future(one.tokens(count=30)) for _ in range(3)]
    await eventually(lambda: len(one.instance.engine.scheduler.running) == 3)
    one.ranks[2].die()
    await eventually(lambda: one.world.started)

    def second(_rank=None) -> None:
        loss(one.ranks[0] if which == "a member" else one.world.started[0])

    if command is Step:  # none runs while they are held: right now
        second()
    else:
        one.world.on_command[command] = [second]
    await whole(one, 4)
    is_sound(one)
    for stream in streams:
        assert (await stream)[:12] == expected
    assert await one.tokens() == expected


async def test_one_hangs_in_what_needs_no_other(elastic):
    """Nobody misses it in a collective: it is found when all others have long answered."""
    one = elastic(8, 4)
    expected = await one.tokens()
    one.ranks[2].hangs = True
    asked = asyncio.ensure_future(one.instance.ranks.same(Beat(), Done))
    with pytest.raises(RankDied):
        await asked
    await eventually(lambda: one.instance.recoveries.ranks_lost == 1)
    await whole(one, 4)
    assert await one.tokens() == expected


async def test_all_are_lost(elastic):
    """Nobody is left: requests end with the reason."""
    one = elastic(4, 2)
    stream = asyncio.ensure_future(one.tokens(count=100))
    await eventually(lambda: one.instance.engine.scheduler.running)
    for rank in list(one.ranks):
        rank.die()
    with pytest.raises((RanksLost, RankDied)):
        await stream
    await eventually(lambda: one.instance.lifecycle.state is State.FAILED)
    assert one.instance.ranks.lost
    assert one.instance.placement.expert_parallel_size == 0


async def test_a_rank_is_lost_where_that_is_the_end(elastic):
    """By default an instance fails with a rank."""
    one = elastic(4, 2, on_rank_loss="fail")
    one.ranks[1].die()
    await eventually(lambda: one.instance.lifecycle.state is State.FAILED)
    assert "rank 1" in one.instance.lifecycle.reason


async def test_scaled_up_and_down(elastic):
    """None is lost, and the tokens are the same all the while."""
    one = elastic(8, 4, redundant=4)
    expected = await one.tokens()
    report = await one.supervisor.recovery.scale(6)
    assert (report.ranks_started, report.bytes_pulled, len(one.ranks)) == (2, 0, 6)
    is_sound(one)
    assert await one.tokens() == expected
    decided = one.instance.membership.epoch
    with pytest.raises(InvalidRequest, match="cannot hold 8 experts"):
        await one.supervisor.recovery.scale(2)
    report = await one.supervisor.recovery.scale(3)
    assert (report.ranks_started, report.bytes_pulled, len(one.ranks)) == (0, 0, 3)
    is_sound(one)
    assert await one.tokens() == expected
    assert sum(not rank.has_ended for rank in [*one.ranks, *one.world.started]) == 3
    assert await one.tokens() == expected
    assert one.instance.membership.epoch == decided + 1, "those that left were taken for lost"


async def test_who_came_later_is_watched(elastic):
    """A rank that was started in the place of a lost one is found at once when it dies, too."""
    one = elastic(8, 4, collective_timeout_seconds=60.0)  # no beat finds it within this test
    one.ranks[3].die()
    await eventually(lambda: one.instance.recoveries.ranks_lost == 1)
    await whole(one, 4)
    one.ranks[3].die()
    await eventually(lambda: one.instance.recoveries.ranks_lost == 2)
    await whole(one, 4)
