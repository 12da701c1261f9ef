"""Checks what lies in the arenas while the instance serves. Plain Python.

    settled → digested, a piece between two steps → still the same weights → compared

Weights that change meanwhile are digested anew: a mixture is never compared.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from engine_service.core import comparing
from engine_service.core.check_messages import Digested, DigestWeights, FoundWeights
from engine_service.core.check_report import CheckMode, CheckReport, Difference
from engine_service.core.instance import Instance
from engine_service.core.peer import Peer, find_peer
from engine_service.errors import NotReady, RanksLost, WrongState
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest, weights_digest

T = TypeVar("T")
ATTEMPTS = 5
"""How often weights are digested anew that change meanwhile."""
WAIT_SECONDS = 60.0
"""How long a check waits for those before it."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all ranks hold, of the same weights."""

    found: tuple[FoundWeights, ...]
    weights: Weights
    manifests: tuple[Manifest, ...]
    """What they should hold."""
    addresses: tuple[int, ...]
    """Where their arenas should lie."""
    seconds_paused: float

    @property
    def digest(self) -> str:
        """Root over all that was found."""
        return weights_digest([one.manifest for one in self.found])


Compare = Callable[[_Pass], Iterator[Difference]]


class Checker:
    """The checks of one instance, one at a time and in the order in which they came."""

    def __init__(self, instance: Instance, wait_seconds: float = WAIT_SECONDS) -> None:
        self._instance = instance
        self._wait_seconds = wait_seconds
        self._checking = asyncio.Lock()
        self._snapshot: CheckReport | None = None
        self._proven: tuple[str, list[comparing.Digests]] = ("", [])
        """A weights digest, and the digests of its tensors by rank."""

    async def check(self, mode: CheckMode, against: str = "") -> CheckReport:
        """Checks the weights; `against` names the instance that `DIFF` compares with.

        Raises `WrongState` while there are none, for a snapshot that was never taken, and for an
        instance that cannot be compared with; `NotReady` when other checks, or changes of the
        weights, don't let it come to an end; `RelayUnreachable`, `RankDied`.
        """
        async with self._turn():
            began = time.monotonic()
            self._check_holds_weights()
            words, compare = await self._prepare(mode, against)
            done = await self._digest()
            # A large model has so many tensors that streams would wait for the loop.
            differences = await asyncio.to_thread(self._compared, done, compare)
            report = CheckReport(
                mode=mode, ranks=done.found, weights=done.weights, against=words,
                differences=differences, ended_at=time.time(),
                seconds=time.monotonic() - began, seconds_paused=done.seconds_paused,
            )  # fmt: skip
            if mode is CheckMode.SNAPSHOT:
                self._snapshot = report
            self._instance.last_check = report
            return report

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._checking.acquire()
        except TimeoutError:
            raise NotReady(f"other checks still run after {self._wait_seconds:g} s") from None
        try:
            yield
        finally:
            self._checking.release()

    def _check_holds_weights(self) -> None:
        state = self._instance.lifecycle.state
        if not (state.holds_weights or state is State.UPDATING):
            raise WrongState(
                f"{self._instance.identity.name} is {state}: it serves no weights to check",
                field="state", expected="READY", found=str(state),
            )  # fmt: skip

    async def _prepare(self, mode: CheckMode, against: str) -> tuple[str, Compare]:
        """Returns what to compare with, in words, and how."""
        match mode:
            case CheckMode.DIGEST:
                return "the digests with which the weights came", self._with_manifests
            case CheckMode.SNAPSHOT:
                return "", lambda _: iter(())
            case CheckMode.COMPARE:
                if self._snapshot is None:
                    raise WrongState("no snapshot was taken in this life of the instance")
                snapshot, was = self._snapshot.ranks, self._snapshot.weights
                _paired(snapshot, self._instance.manifests)
                return f"the snapshot of {was.version}, epoch {was.epoch}", lambda done: (
                    difference
                    for old, now in _paired(snapshot, done.found)
                    for difference in comparing.with_snapshot(old, now)
                )
        peer: Peer = await find_peer(self._instance, against)
        return peer.words, lambda done: comparing.with_units(peer.units, done.found, peer.parts)

    async def _digest(self) -> _Pass:
        """Returns what lies in memory, of weights that did not change while it was digested."""
        lifecycle, engine = self._instance.lifecycle, self._instance.engine
        for _ in range(ATTEMPTS):
            await lifecycle.left(State.UPDATING)
            self._check_holds_weights()
            weights = engine.weights
            found, seconds = await self._pieces()
            same = engine.weights.epoch == weights.epoch
            if found and same and lifecycle.state is not State.UPDATING:
                manifests = tuple(self._instance.manifests)
                addresses = tuple(arena.address for arena in self._instance.ranks.arenas)
                return _Pass(found, weights, manifests, addresses, seconds)
        raise NotReady(f"the weights changed while they were checked, {ATTEMPTS} times in a row")

    async def _pieces(self) -> tuple[tuple[FoundWeights, ...], float]:
        """Has all ranks digest everything; returns nothing of weights that changed meanwhile."""
        ranks, patience = self._instance.ranks, self._instance.config.patience_seconds
        found: dict[int, FoundWeights] = {}
        seconds = 0.0
        for number in itertools.count():
            # Whatever waits for the ranks' stream, a step above all, comes before the next piece.
            try:
                command = DigestWeights(begin=not number)
                replies = await ranks.in_time(command, Digested, patience)
            except RanksLost:  # others hold the weights by now
                return (), seconds
            seconds += max(reply.seconds for reply in replies)
            if any(reply.changed for reply in replies):
                return (), seconds
            found |= {rank: reply.found for rank, reply in enumerate(replies) if reply.found}
            if len(found) == len(replies):
                break
        return tuple(found[rank] for rank in sorted(found)), seconds

    def _compared(self, done: _Pass, compare: Compare) -> tuple[Difference, ...]:
        if done.digest == done.weights.digest:
            self._proven = done.digest, [comparing.tensor_digests(one) for one in done.found]
        return (*compare(done), *self._within(done))

    def _with_manifests(self, done: _Pass) -> Iterator[Difference]:
        digest, proven = self._proven
        for rank, (expected, now) in enumerate(zip(done.manifests, done.found, strict=True)):
            known = proven[rank] if digest == done.weights.digest else None
            yield from comparing.with_manifest(expected, now, known)

    def _within(self, done: _Pass) -> Iterator[Difference]:
        """Compares the ranks with each other, and the places of tensors with what they were."""
        yield from comparing.replicas(done.found, self._instance.placement.tensor_parallel_size)
        for now, address in zip(done.found, done.addresses, strict=True):
            yield from comparing.misplaced(now, address)


def _paired(snapshot: Sequence[FoundWeights], now: Sequence[T]) -> Iterator[tuple[FoundWeights, T]]:
    """Returns ranks as they were and as they are. Raises `WrongState` where they are others."""
    if len(snapshot) != len(now):
        raise WrongState(
            f"the snapshot is of {len(snapshot)} ranks, and there are {len(now)}",
            field="mode", hint="take a new one",
        )  # fmt: skip
    return zip(snapshot, now, strict=True)
