"""State of an instance: one owner, named transitions, watchers. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from engine_service.errors import WrongState
from relay_service.core.instance import State

S = State
_NEXT: dict[State, tuple[State, ...]] = {
    S.STARTING: (S.LOADING, S.DUMMY),
    S.LOADING: (S.READY,),
    # From DUMMY to LOADING: no source was found and the operator allows the disk.
    S.DUMMY: (S.LANDING, S.LOADING),
    S.LANDING: (S.READY, S.DUMMY),
    S.READY: (S.PAUSED, S.UPDATING),
    S.PAUSED: (S.READY, S.UPDATING),
    S.UPDATING: (S.READY, S.PAUSED),
    S.DRAINING: (S.STOPPED,),
    S.STOPPED: (),
    S.FAILED: (S.DRAINING, S.STOPPED),
}


class Lifecycle:
    """The one place that knows and changes the state."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason = ""
        self._changed = asyncio.Event()

    @property
    def serves(self) -> bool:
        """Whether it has weights to serve with; it may be paused."""
        return self.state in (State.READY, State.PAUSED, State.UPDATING)

    def to(self, state: State, reason: str = "") -> None:
        """Enters a state and wakes the watchers. Raises `WrongState` for a step that isn't."""
        always = state in (State.FAILED, State.DRAINING) and self.state is not State.STOPPED
        if not always and state not in _NEXT[self.state]:
            raise WrongState(
                f"an instance that is {self.state} cannot become {state}",
                field="state", found=str(self.state),
            )  # fmt: skip
        self.state, self.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Waits until a state is entered."""
        await self._changed.wait()

    async def watch(self) -> AsyncGenerator[State]:
        """Yields the present state and later ones, `STOPPED` last; a slow watcher misses some."""
        while True:
            changed, state = self._changed, self.state
            yield state
            if state is State.STOPPED:
                return
            await changed.wait()

    async def left(self, *states: State) -> State:
        """Waits until the state is none of `states`; returns it."""
        async for state in self.watch():
            if state not in states:
                return state
        return self.state
