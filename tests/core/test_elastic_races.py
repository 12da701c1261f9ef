"""Losses and changes of members at inconvenient moments: nothing is left behind, nothing lies."""

import asyncio
from types import SimpleNamespace

import pytest
from elastic import Elastic, filled
from fakes import eventually, resources, verified

from engine_service.core.member_messages import Place, Rejoin, TakeUnits
from engine_service.core.membership import MembershipState, RecoverOptions
from engine_service.core.messages import Capture, CheckProbe, Start
from engine_service.core.pause_modes import PauseMode, PauseRequest
from engine_service.core.prefix import kv_origin
from engine_service.core.step_messages import Step
from engine_service.errors import (
    CaptureError,
    CollectiveFailed,
    EngineError,
    NotReady,
    ProbeMismatch,
    RankDied,
    RecoveryFailed,
)
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest

DEGRADED, HELD = MembershipState.DEGRADED, MembershipState.HELD
EVERYWHERE = {"experts": 4, "groups": 3, "redundant": 8}
"""Every group holds everything."""


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


async def degraded(one: Elastic) -> None:
    """Loses the last group."""
    one.ranks[-1].die()
    await eventually(lambda: one.instance.membership.groups_lost == 1)


async def test_a_fresh_rank_that_stays_has_no_kv(elastic):
    """The commit broke off after all had their experts: what was computed before is forgotten."""
    one = elastic(**EVERYWHERE, on_rank_loss="degrade")
    expected = await one.tokens(prompt=9)
    await degraded(one)
    victim = one.ranks[0]
    one.world.on_command[CheckProbe] = [lambda _: victim.die()]
    with pytest.raises(RankDied):
        await one.supervisor.recovery.recover(RecoverOptions(replace=True))
    await eventually(lambda: victim not in one.ranks)
    assert any(rank in one.world.started for rank in one.ranks)
    assert await one.tokens(prompt=9) == expected


async def test_one_change_at_a_time(elastic):
    """Also when two are asked for at once."""
    one = elastic(**EVERYWHERE)
    scaling = [one.supervisor.recovery.scale(4), one.supervisor.recovery.scale(5)]
    done = await asyncio.gather(*scaling, return_exceptions=True)
    assert [type(d).__name__ for d in done] == ["ExpertReport", "UpdateBusy"]
    assert len(one.ranks) == 4
    assert await one.tokens()


@pytest.mark.parametrize("which", ["a member", "the fresh one"])
async def test_a_rank_cannot_take_part(elastic, which):
    """It answers with an error instead of an end: requests notice nothing."""
    one = elastic(**EVERYWHERE, on_rank_loss="degrade")
    expected = await one.tokens()
    await degraded(one)

    async def fail() -> None:
        raise CaptureError("it cannot be captured")

    def happens(_rank) -> None:
        rank = one.ranks[0] if which == "a member" else one.world.started[0]
        rank.before[Capture] = fail

    one.world.on_command[Place] = [happens]
    stream = asyncio.ensure_future(one.tokens(count=100))
    await eventually(lambda: one.instance.engine.scheduler.running)
    with pytest.raises(EngineError, match="cannot be captured"):
        await one.supervisor.recovery.recover(RecoverOptions(replace=True))
    assert (await stream)[:12] == expected
    assert await one.tokens() == expected
    await one.supervisor.recovery.recover(RecoverOptions(replace=True))
    assert len(one.ranks) == 3


async def test_no_token_of_ranks_that_compute_something_else(elastic):
    """All that runs fails with the instance."""
    one = elastic(**EVERYWHERE)
    one.instance.probe = b"something else"
    stream = asyncio.ensure_future(one.tokens(count=190))
    await eventually(lambda: one.instance.engine.scheduler.running)
    with pytest.raises(ProbeMismatch):
        await one.supervisor.recovery.scale(4)
    assert one.instance.lifecycle.state is State.FAILED
    with pytest.raises(EngineError, match="compute something else"):
        await stream


async def test_what_is_committed_by_hand_may_be_late(elastic):
    """At the deadline, what is being committed comes to its end."""
    settings = {"recovery_deadline_seconds": 0.5, "collective_timeout_seconds": 2.0}
    one = elastic(8, 4, on_rank_loss="degrade", **settings)
    expected = await one.tokens()
    one.ranks[3].die()
    await eventually(lambda: one.instance.membership.state is HELD)
    over = asyncio.get_running_loop().time() + 0.7

    async def late() -> None:
        while asyncio.get_running_loop().time() < over:  # noqa: ASYNC110 - it is just late
            await asyncio.sleep(0.01)

    one.world.on_command[CheckProbe] = [lambda rank: rank.before.update({CheckProbe: late})]
    await one.supervisor.recovery.recover(RecoverOptions())
    assert await one.tokens() == expected
    assert one.instance.lifecycle.state is State.READY


async def test_whoever_takes_waits_for_whoever_reads(elastic):
    """The time of one is not that of the other: none is taken for one that hangs."""
    one = elastic(8, 4, on_rank_loss="degrade", collective_timeout_seconds=1.0)
    one.ranks[3].die()
    await eventually(lambda: one.instance.membership.state is HELD)

    def starts(rank) -> None:
        rank.before[TakeUnits] = first

    async def first() -> None:
        one.world.started[0].before[TakeUnits] = lambda: asyncio.sleep(0.6)
        await asyncio.sleep(0.8)

    one.world.on_command[Start] = [starts]
    await one.supervisor.recovery.recover(RecoverOptions())
    assert one.instance.recoveries.ranks_lost == 1


async def test_a_commit_that_waits_for_requests_which_are_held(elastic):
    """It gives up, and its turn with it: what was lost is brought back."""
    one = elastic(8, 4)
    expected = await one.tokens(count=60)
    stream = asyncio.ensure_future(one.tokens(count=60))
    await eventually(lambda: one.instance.engine.scheduler.running)

    async def update() -> None:
        instance, waits = one.instance, PauseRequest(PauseMode.WAIT)
        async with instance.turn.taken("an update"), instance.pauser.applying(waits):
            raise AssertionError("nothing runs that could end")

    updating = asyncio.ensure_future(update())
    await eventually(lambda: one.instance.turn.holder)
    one.ranks[2].die()
    with pytest.raises(NotReady, match="a rank was lost"):
        await updating
    assert await stream == expected


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT])
async def test_paused_while_ranks_are_lost_and_come(elastic, mode):
    """It stays paused; whoever continues goes on with the same tokens, on the ranks of then."""
    one = elastic(**EVERYWHERE, on_rank_loss="degrade")
    expected = await one.tokens(count=60)
    stream = asyncio.ensure_future(one.tokens(count=60))
    await eventually(lambda: one.instance.engine.scheduler.running)
    await one.instance.pauser.pause(PauseRequest(mode))
    await degraded(one)
    assert one.instance.lifecycle.state is State.PAUSED
    await one.supervisor.recovery.recover(RecoverOptions(replace=True))
    assert one.instance.lifecycle.state is State.PAUSED
    assert not stream.done()
    await one.instance.pauser.resume()
    assert await stream == expected


async def test_frozen_requests_have_no_kv_on_fresh_ranks(elastic):
    """A pause keeps it; ranks that come have none: it is computed anew."""
    one = elastic(**EVERYWHERE)
    expected = await one.tokens(count=60)
    stream = asyncio.ensure_future(one.tokens(count=60))
    await eventually(lambda: one.instance.engine.scheduler.running)
    await one.instance.pauser.pause(PauseRequest(PauseMode.KEEP))
    assert one.instance.engine.scheduler.running
    await one.supervisor.recovery.scale(4)
    await one.instance.pauser.resume()
    assert await stream == expected


async def test_continued_and_aborted_while_held(elastic):
    """Whoever continues lets nothing run; whoever aborts is answered at once."""
    one = elastic(8, 4, on_rank_loss="degrade")
    stream = asyncio.ensure_future(one.tokens(count=60))
    await eventually(lambda: one.instance.engine.scheduler.running)
    await one.instance.pauser.pause(PauseRequest(PauseMode.KEEP))
    one.ranks[3].die()
    await eventually(lambda: one.instance.membership.state is HELD)
    assert one.instance.lifecycle.state is State.UPDATING
    await one.instance.pauser.resume()
    assert one.instance.engine.frozen
    assert one.instance.lifecycle.state is State.UPDATING
    assert one.instance.engine.abort_all() == 1
    assert len(await stream) < 60
    await one.supervisor.recovery.recover(RecoverOptions())
    assert one.instance.lifecycle.state is State.READY
    assert await one.tokens()


async def test_what_is_cached_is_found_by_those_who_live(elastic):
    """They have computed it, with the weights that still serve; lost experts make a difference."""
    one = elastic(**EVERYWHERE, on_rank_loss="degrade")
    before = kv_origin(one.instance.engine.weights)
    await degraded(one)
    weights = one.instance.engine.weights
    assert (weights.kv_origin, weights.epoch) == (before, 2)
    routed = elastic(8, 4, on_rank_loss="degrade", lost_experts="route")
    expected = await routed.tokens(prompt=9)
    for left in (3, 2):
        routed.ranks[0].die()
        await eventually(lambda left=left: len(routed.ranks) == left)
        await eventually(lambda: not routed.instance.engine.frozen)
        assert await routed.tokens(prompt=9) != expected
    await routed.supervisor.recovery.recover(RecoverOptions(replace=True))
    assert await routed.tokens(prompt=9) == expected


async def test_updated_while_degraded(elastic):
    """What is lost later is of the weights that serve then."""
    one = elastic(6, 3, 1, 6, on_rank_loss="degrade")
    await degraded(one)
    instance = one.instance
    assert instance.membership.state is DEGRADED
    async with instance.engine.between_steps():
        for number, rank in enumerate(one.ranks):
            data = filled(rank.manifest, 0, "v2")
            rank.arena.land(0, data)
            instance.manifests[number] = verified(rank.manifest, data)
        before = instance.engine.weights
        digest = weights_digest(instance.manifests)
        instance.engine.switch(Weights("v2", digest, before.epoch + 1))
        instance.probe = one.ranks[0].tokens_of(())
    expected = await one.tokens()
    one.ranks[1].die()
    await eventually(lambda: instance.membership.state is HELD)
    with pytest.raises(RecoveryFailed, match="other weights"):
        await one.supervisor.recovery.recover(RecoverOptions())
    one.world.disk_version = "v2"
    await one.supervisor.recovery.recover(RecoverOptions())
    assert await one.tokens() == expected
    assert instance.engine.weights.version == "v2"


async def test_a_false_alarm(elastic):
    """A collective failed though all live: they meet anew, and nobody notices."""
    one = elastic(8, 4)
    expected = await one.tokens(count=60)

    async def fail() -> None:
        raise CollectiveFailed("it took too long")

    for _ in range(5):
        one.ranks[2].before[Step] = fail
        assert await one.tokens(count=60) == expected
    assert (len(one.ranks), one.instance.recoveries.ranks_lost) == (4, 0)
    assert one.instance.membership.state is MembershipState.WHOLE
    assert one.instance.engine.weights.version == "v1"


async def test_others_are_told(elastic):
    """An update ends with a loss; a relay sees the arenas of the ranks that there are now."""
    one, told = elastic(**EVERYWHERE, on_rank_loss="degrade"), []
    one.instance.interrupt_update = told.append
    one.instance.link = SimpleNamespace(detach=lambda: told.append(len(one.ranks)))
    await degraded(one)
    await eventually(lambda: told == ["a rank was lost", 2])
    await one.supervisor.recovery.recover(RecoverOptions(replace=True))
    await eventually(lambda: told == ["a rank was lost", 2, 3])
    one.instance.link = None


async def test_ranks_that_never_meet(elastic):
    """All of them live, and cannot compute together: that has an end."""
    one = elastic(8, 4)

    async def fail() -> None:
        for rank in one.ranks:
            rank.before[Rejoin] = fail
        raise CollectiveFailed("nobody came")

    one.ranks[0].before[Step] = fail
    async with asyncio.timeout(10):
        with pytest.raises(RankDied, match="nobody came"):
            await one.tokens()
    assert one.instance.lifecycle.state is State.FAILED


async def test_nothing_lies_in_between(elastic):
    """At every moment, lists by rank are of one length, and say what can be described."""
    one = elastic(6, 3, 2, 3)
    watched = 0

    async def watch() -> None:
        nonlocal watched
        instance, ranks = one.instance, one.instance.ranks
        while True:
            sizes = {len(x) for x in (instance.manifests, ranks.workers, ranks.descriptors)}
            assert sizes == {len(ranks.arenas)}, "by rank"
            if ranks.arenas:
                instance.describe()
            watched += 1
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    for change in (None, 4, 2):
        if change:
            await one.supervisor.recovery.scale(change)
        else:
            one.ranks[3].die()
            await eventually(lambda: one.instance.membership.epoch > 1)
            await eventually(lambda: one.instance.membership.state is MembershipState.WHOLE)
            await eventually(lambda: not one.instance.turn.holder)
    assert not watching.done(), watching.exception()
    watching.cancel()
    assert watched > 100


@pytest.mark.parametrize("way", ["interrupted", "closed"])
async def test_ended_at_any_moment(elastic, way):
    """No process, descriptor or half of a change is left, wherever a recovery was."""
    reached = set()
    for ticks in range(0, 120, 3):
        one = elastic(6, 3, 2, 3, on_rank_loss="degrade")
        await degraded(one)
        recovery = one.supervisor.recovery
        work = asyncio.ensure_future(recovery.recover(RecoverOptions(replace=True)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        reached.add(recovery.progress.phase if recovery.progress else "")
        if way == "closed":
            one.running.cancel()
            await asyncio.wait([one.running])
        else:
            await recovery.interrupt()
        (end,) = await asyncio.gather(work, return_exceptions=True)
        members = 4 if isinstance(end, BaseException) else 6
        if way == "interrupted":
            await eventually(lambda count=members, one=one: len(one.ranks) == count)
            assert len(await one.tokens()) == 12
        assert len(one.ranks) == members, end
        assert all(rank.has_ended for rank in one.world.started if rank not in one.ranks)
        await one.close()
    assert reached > {"starting", "copying"}
