"""Which states follow which, and who hears of it."""

import asyncio

import pytest

from engine_service.core.lifecycle import Lifecycle
from engine_service.errors import WrongState
from relay_service.core.instance import State

S = State

PATHS = {
    S.STARTING: [],
    S.LOADING: [S.LOADING],
    S.DUMMY: [S.DUMMY],
    S.LANDING: [S.DUMMY, S.LANDING],
    S.READY: [S.LOADING, S.READY],
    S.PAUSED: [S.LOADING, S.READY, S.PAUSED],
    S.UPDATING: [S.LOADING, S.READY, S.UPDATING],
    S.DRAINING: [S.DRAINING],
    S.STOPPED: [S.DRAINING, S.STOPPED],
    S.FAILED: [S.FAILED],
}
"""A way to each state."""
NEXT = {
    S.STARTING: {S.LOADING, S.DUMMY, S.DRAINING, S.FAILED},
    S.LOADING: {S.READY, S.DRAINING, S.FAILED},
    S.DUMMY: {S.LANDING, S.LOADING, S.DRAINING, S.FAILED},
    S.LANDING: {S.READY, S.DUMMY, S.DRAINING, S.FAILED},
    S.READY: {S.PAUSED, S.UPDATING, S.DRAINING, S.FAILED},
    S.PAUSED: {S.READY, S.UPDATING, S.DRAINING, S.FAILED},
    S.UPDATING: {S.READY, S.PAUSED, S.DRAINING, S.FAILED},
    S.DRAINING: {S.STOPPED, S.DRAINING, S.FAILED},
    S.STOPPED: set(),
    S.FAILED: {S.DRAINING, S.STOPPED, S.FAILED},
}
"""Every step that may be taken; DESIGN 5."""


def in_state(state: S) -> Lifecycle:
    """Returns an instance's life up to a state."""
    lifecycle = Lifecycle()
    for step in PATHS[state]:
        lifecycle.to(step)
    return lifecycle


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
def test_every_step(before, after):
    """The steps of the table may be taken; every other one is refused and changes nothing."""
    lifecycle = in_state(before)
    if after in NEXT[before]:
        lifecycle.to(after, "because")
        assert (lifecycle.state, lifecycle.reason) == (after, "because")
    else:
        with pytest.raises(WrongState, match=f"is {before} cannot become {after}"):
            lifecycle.to(after)
        assert lifecycle.state is before


def test_a_dummy_never_serves_at_once():
    """No step leads from a dummy, or from the start, to ready without landing or loading."""
    assert [state for state, after in NEXT.items() if S.READY in after] == [
        S.LOADING, S.LANDING, S.PAUSED, S.UPDATING,
    ]  # fmt: skip


async def test_watching():
    """A watcher sees the present state, later ones, and its end at `STOPPED`."""
    lifecycle, seen = Lifecycle(), []

    async def watch() -> None:
        async for state in lifecycle.watch():
            seen.append(state)  # noqa: PERF401

    watching = asyncio.create_task(watch())
    for state in (S.LOADING, S.READY, S.DRAINING, S.STOPPED):
        for _ in range(3):
            await asyncio.sleep(0)
        lifecycle.to(state)
    await asyncio.wait_for(watching, 10)
    assert seen == [S.STARTING, S.LOADING, S.READY, S.DRAINING, S.STOPPED]


async def test_a_late_watcher_misses_no_present():
    """A watcher that was busy sees the state as it is now, and never misses the end."""
    lifecycle = in_state(S.READY)
    watching = lifecycle.watch()
    assert await anext(watching) is S.READY
    lifecycle.to(S.PAUSED)
    lifecycle.to(S.READY)
    lifecycle.to(S.UPDATING)
    assert await anext(watching) is S.UPDATING
    lifecycle.to(S.DRAINING)
    lifecycle.to(S.STOPPED)
    assert [state async for state in watching] == [S.STOPPED]


async def test_waiting_until_a_state_is_left():
    """Whoever waits for the end of some states gets the first other one."""
    lifecycle = Lifecycle()
    waiting = asyncio.create_task(lifecycle.left(S.STARTING, S.LOADING))
    await asyncio.sleep(0)
    lifecycle.to(S.LOADING)
    await asyncio.sleep(0)
    assert not waiting.done()
    lifecycle.to(S.READY)
    assert await asyncio.wait_for(waiting, 10) is S.READY
