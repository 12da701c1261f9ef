"""Who may update the weights: one session at a time, and a short queue. Plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine_service.core.instance import Instance
from engine_service.core.model_root import ModelRoot
from engine_service.core.update import Update
from engine_service.core.update_files import check_names
from engine_service.core.update_layerwise import LayerwiseUpdate
from engine_service.core.update_messages import PushedHeader, StagePiece
from engine_service.core.update_phases import UpdateTally
from engine_service.core.update_request import (
    DiskSource,
    Phase,
    PushSource,
    RelaySource,
    StagedWeights,
    Staging,
    UpdateProgress,
    UpdateReport,
    WeightUpdate,
)
from engine_service.core.update_session import Session
from engine_service.core.update_sources import (
    DiskStaging,
    PushStaging,
    RelayStaging,
    UpdateSource,
)
from engine_service.core.version_history import Result
from engine_service.errors import InvalidRequest, UpdateEnded, WrongState

LEASE_SECONDS = 60.0
MAX_LEASE_SECONDS = 3600.0
MAX_KNOWN = 32
"""Sessions that are remembered, so that a repeated call is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks for an update, and how long there is time."""

    operator: str = ""
    key: str = ""
    """Idempotency key; empty for none."""
    lease_seconds: float = LEASE_SECONDS
    wait_seconds: float = 0.0
    """Time to wait for another update to end; 0 to fail at once."""


class UpdateSessions:
    """The updates of one instance."""

    def __init__(self, instance: Instance) -> None:
        """Raises `ConfigError` for a key that cannot be used."""
        config = instance.config
        key = Path(config.model_key) if config.model_key else None
        root = Path(config.model_root) if config.model_root else Path(config.model).resolve().parent
        self._root = ModelRoot(root, key)
        self._instance = instance
        self._known: dict[str, Session] = {}
        self._keys: dict[str, tuple[WeightUpdate, str]] = {}
        """What was asked for, and the session that it began, by idempotency key."""
        self._beginning: dict[str, asyncio.Future[None]] = {}
        """Calls that wait for their turn, by idempotency key."""
        self.current: Session | None = None
        self.tally = UpdateTally()
        instance.updating = lambda: self.current.progress if self.current else None
        instance.interrupt_update = self._interrupt

    async def begin(self, wanted: WeightUpdate, caller: Caller) -> Session:
        """Begins a session; a repeated call with the same key returns the one that it began.

        Raises `WrongState` unless just the weights serve that it is for, `InvalidRequest`, or
        `UpdateBusy` while somebody else's update goes on.
        """
        session, _ = await self._begin_once(wanted, caller)
        return session

    def _interrupt(self, reason: str) -> None:
        if self.current and not self.current.is_committing:
            self.current.end(Result.ABORTED, reason)

    def session(self, name: str) -> Session:
        """Returns a session. Raises `UpdateEnded` for one that is not known, or not any more."""
        if name not in self._known:
            raise UpdateEnded(f"no session {name!r:.64} is known", field="session", found=name)
        return self._known[name]

    async def stage(self, name: str) -> StagedWeights:
        """Stages what the engine reads by itself. Raises like `Session.stage`."""
        session = self.session(name)
        return await session.stage(self._own_source(session.update.wanted))

    async def push(
        self, name: str, tensors: Sequence[PushedHeader], pieces: AsyncIterator[StagePiece]
    ) -> StagedWeights:
        """Stages what the caller sends; the lease runs while the caller is waited for."""
        session = self.session(name)
        if not isinstance(session.update.wanted.source, PushSource):
            raise WrongState("its tensors are not pushed", field="session", found=name)
        source = PushStaging(tensors, pieces)
        source.on_word, source.on_wait = session.hold_lease, session.renew
        return await session.stage(source)

    async def abort(self, name: str, reason: str) -> bool:
        """Ends a session; returns whether there was one to end. Raises `WrongState` in a commit."""
        session = self._known.get(name)
        return session is not None and await session.abort(reason)

    async def update(
        self, wanted: WeightUpdate, caller: Caller, on_session: Callable[[Session], None]
    ) -> UpdateReport:
        """Does a whole update. A caller that leaves aborts it, unless it is being applied.

        With the key of an update that goes on already, or was committed, it answers like that.
        """
        source = self._own_source(wanted)
        while True:
            session, is_new = await self._begin_once(wanted, caller)
            on_session(session)
            if is_new:
                await session.stage(source)
                return await session.commit()
            await session.has_ended()
            if session.report:
                return session.report
            if session.error:
                raise session.error

    @property
    def waiting(self) -> UpdateProgress:
        """What a call sees that waits for its turn."""
        return UpdateProgress(phase=Phase.WAITING, note=self._instance.turn.holder)

    async def _begin_once(self, wanted: WeightUpdate, caller: Caller) -> tuple[Session, bool]:
        """Returns a session, and whether this call has begun it."""
        key, clock = caller.key, asyncio.get_running_loop().time
        until = clock() + caller.wait_seconds
        while key in self._beginning:  # the same call, in the queue already
            left = max(0.0, until - clock())
            done, _ = await asyncio.wait([self._beginning[key]], timeout=left)
            if not done:
                raise self._instance.turn.busy()
            caller = replace(caller, wait_seconds=max(0.0, until - clock()))
        if known := self._begun(key, wanted):
            return known, False
        if not key:
            return await self._begin(wanted, caller), True
        self._beginning[key] = asyncio.get_running_loop().create_future()
        try:
            session = await self._begin(wanted, caller)
            self._keys[key] = wanted, session.name
        finally:
            self._beginning.pop(key).set_result(None)
        return session, True

    def _begun(self, key: str, wanted: WeightUpdate) -> Session | None:
        """Returns the session of a key, unless it came to nothing."""
        before, name = self._keys.get(key, (wanted, ""))
        if before != wanted:
            raise InvalidRequest("the key was used for another update", field="idempotency_key")
        session = self._known.get(name)
        return session if session and session.result in (None, Result.SERVES) else None

    async def _begin(self, wanted: WeightUpdate, caller: Caller) -> Session:
        turn = self._instance.turn
        self._check(wanted)  # what is wrong already need not wait
        await turn.take(f"{caller.operator}, for {wanted.version}", caller.wait_seconds)
        try:
            pause = replace(wanted.pause, operator=caller.operator)
            update = self._make(replace(wanted, pause=pause))
        except BaseException:
            turn.give()
            raise
        self.current = Session(update, caller.operator, caller.lease_seconds, self._ended)
        self._remember(self.current)
        return self.current

    def _make(self, wanted: WeightUpdate) -> Update:
        kind = LayerwiseUpdate if wanted.staging is Staging.LAYERWISE else Update
        return kind(self._instance, wanted)

    def _check(self, wanted: WeightUpdate) -> None:
        """Raises what can be said whatever serves."""
        check_names(wanted.files)
        if not isinstance(wanted.source, PushSource):
            self._own_source(wanted)

    def _own_source(self, wanted: WeightUpdate) -> UpdateSource:
        match wanted.source:
            case DiskSource() as disk:
                return DiskStaging(self._root, disk)
            case RelaySource() as relay if self._instance.link:
                return RelayStaging(self._instance.link, relay)
            case RelaySource():
                raise WrongState("the engine is attached to no relay", field="source.relay")
        raise WrongState(
            "its tensors are pushed: call PushWeights", field="source", found=str(wanted.source)
        )

    def _remember(self, session: Session) -> None:
        self._known[session.name] = session
        while len(self._known) > MAX_KNOWN:
            forgotten = next(iter(self._known))
            del self._known[forgotten]
            self._keys = {key: one for key, one in self._keys.items() if one[1] != forgotten}

    def _ended(self) -> None:
        if self.current and self.current.result:
            self.tally.add(self.current.result, self.current.update.clock.seconds)
        self.current = None
        self._instance.turn.give()
