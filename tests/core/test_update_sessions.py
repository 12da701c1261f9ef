"""Who may update: leases, keys, the queue, shutdown. In virtual time: nothing here waits."""

import asyncio
import functools
from dataclasses import replace

import pytest
from updates import BRINGS, TENSORS, Stand, manifests_of, pieces, virtually, wanted

from engine_service.core.expert_moves import ExpertMoves
from engine_service.core.turn import MAX_WAITING, MOVES
from engine_service.core.update_messages import StagePiece
from engine_service.core.update_request import Phase
from engine_service.core.update_sessions import MAX_KNOWN, Caller
from engine_service.core.version_history import Result
from engine_service.errors import (
    CheckpointError,
    InvalidRequest,
    RankDied,
    UpdateBusy,
    UpdateEnded,
    WrongState,
)
from relay_service.core.instance import State
from relay_service.core.manifest import weights_digest

PUSH = wanted("push")
NEW_DIGEST = weights_digest(manifests_of(BRINGS["push"]()))


def virtual(test):
    """Runs a test on an instance whose clock jumps."""

    @functools.wraps(test)
    def run(tmp_path):
        virtually(lambda: test(Stand(tmp_path)))

    del run.__wrapped__  # pytest shall see the arguments of `run`
    return run


async def staged(stand: Stand, caller: Caller = Caller()) -> str:  # noqa: B008
    """Returns the name of a session whose weights are staged."""
    session = await stand.updates.begin(PUSH, caller)
    await stand.updates.push(session.name, TENSORS, pieces())
    return session.name


async def until(condition) -> None:
    """Lets others run until a condition holds."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


@virtual
async def test_a_lease_that_ends(stand):
    """A caller that dies holds nobody up for longer; what it staged is gone."""
    before = stand.facts()
    name = await staged(stand, Caller(operator="trainer", lease_seconds=10))
    await asyncio.sleep(9)
    stand.updates.session(name).renew()
    await asyncio.sleep(9)
    with pytest.raises(UpdateBusy, match="trainer, for v2 changes the weights") as busy:
        await stand.updates.begin(PUSH, Caller())
    details = busy.value.details
    assert (details["holder"], details["age_seconds"]) == ("trainer, for v2", "18.000")
    await asyncio.sleep(2)
    assert stand.updates.current is None
    assert stand.facts() == before
    assert stand.ranks.staged is None
    last = stand.instance.history.records[-1]
    assert (last.result, last.operator) == (Result.ABORTED, "trainer")
    for call in (stand.updates.session(name).commit, stand.updates.session(name).renew):
        with pytest.raises(UpdateEnded, match="lease has ended without a word"):
            await call() if asyncio.iscoroutinefunction(call) else call()
    await stand.updates.begin(PUSH, Caller())


@virtual
async def test_a_lease_while_the_engine_stages(stand):
    """A living call is word enough, however long it takes; then the lease begins anew."""
    stand.folder()
    stand.steps.hold_at = "FinishStaging"
    session = await stand.updates.begin(PUSH, Caller(lease_seconds=10))

    async def all_but_silent():
        async for piece in pieces():
            await asyncio.sleep(9)
            yield piece

    staging = asyncio.ensure_future(stand.updates.push(session.name, TENSORS, all_but_silent()))
    await stand.steps.reached.wait()
    assert session.result is None, "27 s in which it sent something every 9"
    await asyncio.sleep(1000)
    assert session.result is None, "it has sent all, and waits for the engine"
    stand.steps.release.set()
    await staging
    await asyncio.sleep(9)
    assert session.result is None
    await asyncio.sleep(2)
    assert session.result is Result.ABORTED


@virtual
async def test_a_push_that_falls_silent(stand):
    """A call that is open and says nothing is ended with its session, even before its first."""
    before = stand.facts()

    async def silent(begins_at):
        for number in range(3):
            if number >= begins_at:
                await asyncio.sleep(1000)
            yield StagePiece(1, 4 * number, b"1234")

    for begins_at in range(3):
        session = await stand.updates.begin(PUSH, Caller(lease_seconds=10))
        with pytest.raises(UpdateEnded, match="lease has ended"):
            await stand.updates.push(session.name, TENSORS, silent(begins_at))
        assert (stand.updates.current, stand.facts()) == (None, before)
        assert asyncio.get_running_loop().time() == 10 * (begins_at + 1)


@virtual
async def test_an_abort_while_it_is_staged(stand):
    """Whoever stages is told, and nothing is left of it."""
    before = stand.facts()
    stand.steps.hold_at = "FinishStaging"
    session = await stand.updates.begin(PUSH, Caller())
    staging = asyncio.ensure_future(stand.updates.push(session.name, TENSORS, pieces()))
    await stand.steps.reached.wait()
    aborting = asyncio.ensure_future(stand.updates.abort(session.name, "by hand"))
    await asyncio.sleep(1)
    assert stand.instance.turn.holder, "the ranks are still at it"
    stand.steps.release.set()
    assert await aborting is True
    with pytest.raises(UpdateEnded, match="by hand"):
        await staging
    assert (stand.updates.current, stand.facts(), stand.ranks.staged) == (None, before, None)


@virtual
async def test_the_lease_does_not_run_in_a_commit(stand):
    """It waits for running requests as long as its pause mode says."""
    name = await staged(stand, Caller(lease_seconds=10))
    stand.steps.hold_at = "pause"
    committing = asyncio.ensure_future(stand.updates.session(name).commit())
    await stand.steps.reached.wait()
    await asyncio.sleep(1000)
    with pytest.raises(WrongState, match="being applied"):
        await stand.updates.abort(name, "")
    stand.steps.release.set()
    assert (await committing).epoch == 2


@virtual
async def test_the_queue(stand):
    """First come, first served; each within its own time, and not more than a few."""
    first = await stand.updates.begin(PUSH, Caller(operator="first"))
    waits = [3, 100, 100, 100]
    calls = [
        asyncio.ensure_future(stand.updates.begin(PUSH, Caller(operator=str(n), wait_seconds=wait)))
        for n, wait in enumerate(waits)
    ]
    await until(lambda: stand.instance.turn.waiting == MAX_WAITING == len(waits))
    with pytest.raises(UpdateBusy, match="4 wait for that"):
        await stand.updates.begin(PUSH, Caller(wait_seconds=1000))
    await asyncio.sleep(4)
    with pytest.raises(UpdateBusy, match="first, for v2"):
        await calls[0]
    calls[2].cancel()
    await first.abort("")
    second = await calls[1]
    assert second.operator == "1"
    assert not calls[3].done()
    await second.abort("")
    assert (await calls[3]).operator == "3"


@virtual
async def test_a_copy_that_hangs(stand):
    """It ends in time, and so does the instance."""
    stand.steps.hold_at = "ApplyUpdate"
    began = asyncio.get_running_loop().time()
    with pytest.raises(RankDied, match="took too long"):
        await stand.update(wanted("push"))
    took = asyncio.get_running_loop().time() - began
    assert 0 <= took - stand.instance.config.collective_timeout_seconds < 1
    assert stand.instance.lifecycle.state is State.FAILED


@virtual
async def test_two_updates_at_once(stand):
    """S22: each caller gets its own answer, and the version is that of the bytes."""
    names = iter("ab")
    stand.steps.hold_at = "ApplyUpdate"

    async def whole():
        version = next(names)
        session = await stand.updates.begin(
            replace(PUSH, version=version), Caller(wait_seconds=100)
        )
        await stand.updates.push(session.name, TENSORS, pieces())
        return version, await session.commit()

    both = asyncio.gather(whole(), whole())
    await stand.steps.reached.wait()
    stand.steps.release.set()
    reports = dict(await both)
    assert {name: (r.version, r.epoch) for name, r in reports.items()} == {
        "a": ("a", 2), "b": ("b", 3),
    }  # fmt: skip
    assert stand.instance.engine.weights.version == "b"
    served = [(one.version, one.result) for one in stand.instance.history.records]
    assert served == [("v1", Result.SERVED), ("a", Result.SERVED), ("b", Result.SERVES)]


@virtual
async def test_a_commit_that_is_repeated(stand):
    """It answers what it answered, also while it goes on, and after others have come."""
    name = await staged(stand)
    session = stand.updates.session(name)
    first, second = await asyncio.gather(session.commit(), session.commit())
    assert first is second
    assert await stand.updates.abort(name, "late") is False
    await session.commit()
    await (stand.updates.session(await staged(stand))).commit()
    assert await stand.updates.session(name).commit() is first
    assert stand.instance.engine.weights.epoch == 3


@virtual
async def test_keys(stand):
    """A repeated call gets what the first one began, also from the queue; another may not."""
    caller = Caller(key="k", wait_seconds=100)
    before = await stand.updates.begin(PUSH, Caller())
    calls = [asyncio.ensure_future(stand.updates.begin(PUSH, caller)) for _ in range(3)]
    await until(lambda: stand.instance.turn.waiting == 1)
    with pytest.raises(UpdateBusy):  # each call has its own time
        await stand.updates.begin(PUSH, replace(caller, wait_seconds=5))
    await before.abort("")
    sessions = await asyncio.gather(*calls)
    assert len({session.name for session in sessions}) == 1
    with pytest.raises(InvalidRequest, match="another update"):
        await stand.updates.begin(replace(PUSH, version="v3"), caller)
    await stand.updates.push(sessions[0].name, TENSORS, pieces())
    report = await sessions[0].commit()
    assert await stand.updates.begin(PUSH, caller) is sessions[0]
    assert await sessions[0].commit() is report
    # A first call that leaves the queue takes nobody with it.
    other = await stand.updates.begin(PUSH, Caller())
    calls = [asyncio.ensure_future(stand.updates.begin(PUSH, replace(caller, key="q")))
             for _ in range(2)]  # fmt: skip
    await until(lambda: stand.instance.turn.waiting == 1)
    calls[0].cancel()
    await other.abort("")
    assert (await calls[1]).result is None


@virtual
async def test_a_key_of_an_update_that_came_to_nothing(stand):
    """It begins anew."""
    caller = Caller(key="k")
    first = await stand.updates.begin(PUSH, caller)
    await first.abort("")
    assert await stand.updates.begin(PUSH, caller) is not first


async def test_a_whole_update_that_is_repeated(tmp_path):
    """With its key it joins the one that goes on, and fails as that does; or is answered."""
    stand, caller = Stand(tmp_path), Caller(key="k")
    stand.folder()
    stand.steps.hold_at = "FinishStaging"
    calls = [asyncio.ensure_future(stand.update(wanted(), caller)) for _ in range(2)]
    await stand.steps.reached.wait()
    stand.ranks.bad = CheckpointError("no")
    stand.steps.release.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(one) for one in done] == ["no", "no"]
    stand.ranks.bad = stand.steps.hold_at = None
    report = await stand.update(wanted(), caller)
    assert await stand.update(wanted(), caller) is report
    assert stand.instance.engine.weights.epoch == 2


@virtual
async def test_only_what_is_staged_is_committed(stand):
    """And it is staged once, by the way that was said."""
    session = await stand.updates.begin(PUSH, Caller())
    with pytest.raises(WrongState, match="not staged yet"):
        await session.commit()
    with pytest.raises(WrongState, match="call PushWeights"):
        await stand.updates.stage(session.name)
    await stand.updates.push(session.name, TENSORS, pieces())
    with pytest.raises(WrongState, match="is staged"):
        await stand.updates.push(session.name, TENSORS, pieces())
    assert session.result is None
    with pytest.raises(UpdateEnded, match="no session"):
        stand.updates.session("nobody")
    assert await stand.updates.abort("nobody", "") is False
    await session.abort("enough")
    assert stand.instance.engine.weights.epoch == 1


@virtual
async def test_shutdown(stand):
    """It ends a session, refuses those that wait, and lets a commit end."""
    session = await stand.updates.begin(PUSH, Caller())
    waiting = asyncio.ensure_future(stand.updates.begin(PUSH, Caller(wait_seconds=100)))
    await until(lambda: stand.instance.turn.waiting == 1)
    stand.instance.lifecycle.to(State.DRAINING)
    await session.has_ended()
    assert session.reason == "the instance is DRAINING"
    with pytest.raises(WrongState, match="is DRAINING"):
        await waiting
    with pytest.raises(WrongState, match="is DRAINING"):
        await stand.updates.begin(PUSH, Caller())
    assert stand.instance.turn.holder == ""


@virtual
async def test_experts_and_updates(stand):
    """Either waits for the other, or is refused: never both at once."""
    session = await stand.updates.begin(PUSH, Caller(operator="trainer"))
    with pytest.raises(WrongState, match="trainer, for v2"):
        await ExpertMoves(stand.instance).change({})
    await session.abort("")
    async with stand.instance.turn.taken(MOVES):
        with pytest.raises(UpdateBusy, match="a move of experts"):
            await stand.updates.begin(PUSH, Caller())
        waiting = asyncio.ensure_future(stand.updates.begin(PUSH, Caller(wait_seconds=9)))
        await until(lambda: stand.instance.turn.waiting == 1)
    assert (await waiting).result is None


@virtual
async def test_what_is_remembered_is_bounded(stand):
    """Sessions that ended long ago are forgotten, with their keys."""
    for number in range(MAX_KNOWN + 3):
        session = await stand.updates.begin(PUSH, Caller(key=str(number)))
        await session.abort("")
    assert len(stand.updates._known) == len(stand.updates._keys) == MAX_KNOWN


@pytest.mark.parametrize("state", [one for one in State if one not in (State.READY, State.PAUSED)])
async def test_states(tmp_path, state):
    """Only weights that serve are updated."""
    stand = Stand(tmp_path)
    stand.service.enter(state)
    with pytest.raises(WrongState, match=f"is {state}"):
        await stand.updates.begin(PUSH, Caller())
    assert stand.instance.turn.holder == ""


async def test_an_engine_without_a_relay(tmp_path):
    """It has nobody to pull from."""
    stand = Stand(tmp_path)
    stand.instance.link = None
    with pytest.raises(WrongState, match="attached to no relay"):
        await stand.update(wanted("relay"))


@virtual
async def test_the_status_of_an_update(stand):
    """How far it is, and nothing when there is none."""
    assert stand.instance.updating() is None
    session = await stand.updates.begin(PUSH, Caller())
    assert (stand.instance.updating().session, stand.instance.updating().phase) == (
        session.name,
        Phase.WAITING,
    )
    await stand.updates.push(session.name, TENSORS, pieces())
    shown = stand.instance.updating()
    assert (shown.phase, shown.bytes_done, shown.bytes_total) == (Phase.STAGED, 13, 13)
    await session.commit()
    assert stand.instance.updating() is None
