"""Has ranks take the units that they shall hold out of memory that the front passes. Plain Python.

Out of arenas of ranks that live, and out of a parcel that holds just what nobody here has: both
at the same time. Ranks check every block; what they took lies beside what serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, TypeVar

from engine_service.core.instance import Instance
from engine_service.core.member_messages import ReadUnits, Taken, TakeUnits, UnitsRead, Wanted
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)
from engine_service.core.messages import Reply
from engine_service.core.parcel_relay import RelayParcels
from engine_service.core.parcel_sources import DiskParcels, ParcelSource, fetch
from engine_service.core.rank_commands import Passed
from engine_service.core.ranks import RankGroup
from engine_service.core.recovery_plan import RecoveryPlan
from relay_service.core.manifest import Manifest
from relay_service.core.together import jointly

DISK = "disk"
"""What names the model folder as the only source."""
SLOWEST_BYTES_PER_SECOND = 50 << 20
"""A rank that takes units slower than so hangs."""
R = TypeVar("R", bound=Reply)


class Memory(NamedTuple):
    """Memory that units are taken from."""

    part: int
    """Tensor-parallel part whose units lie there."""
    manifest: Manifest
    descriptors: list[int]
    """The first one is of host memory with a header."""


class Gatherer:
    """Carries out one plan."""

    def __init__(
        self, instance: Instance, fresh: RankGroup, first: int, note: OnExpertProgress
    ) -> None:
        """`fresh` ranks are numbered from `first` on among the new members."""
        self._instance = instance
        self._fresh = fresh
        self._first = first
        self._note = note
        self._started = asyncio.Event()

    async def gather(
        self, planned: RecoveryPlan, memories: Sequence[Memory], options: RecoverOptions,
        report: ExpertReport, start: Awaitable[None],
    ) -> None:  # fmt: skip
        """Returns when every rank has taken what it shall hold.

        `start` gives fresh ranks their room: what is missing is fetched meanwhile.

        Raises `RecoveryFailed` where nobody gives what is missing, `ArenaError` for bytes that
        are not what they should be, `RankDied`.
        """
        parts = [self._start(start), self._copy(planned, memories, report)]
        if planned.missing:
            parts.append(self._pull(planned, options, report))
        await jointly(*parts)

    async def _start(self, start: Awaitable[None]) -> None:
        await start
        self._started.set()

    async def _copy(
        self, planned: RecoveryPlan, memories: Sequence[Memory], report: ExpertReport
    ) -> None:
        total = sum(_nbytes(memories[one.source].manifest, one.wanted) for one in planned.takes)
        for one in planned.takes:
            if not planned.missing:  # else what is pulled is what one waits for
                progress = ExpertProgress(
                    phase="copying", bytes_done=report.bytes_copied, bytes_total=total
                )
                self._note(progress)
            report.bytes_copied += await self._take(one.target, memories[one.source], one.wanted)

    async def _pull(
        self, planned: RecoveryPlan, options: RecoverOptions, report: ExpertReport
    ) -> None:
        began, parts = time.monotonic(), self._instance.config.tensor_parallel_size
        fetched = await fetch(
            planned.missing, self._sources(options.source), self._note,
            timeout_seconds=self._instance.config.recovery_deadline_seconds,
        )  # fmt: skip
        try:
            report.pulled = fetched.pulled
            report.seconds_pulled = time.monotonic() - began
            self._note(ExpertProgress(phase="staging", bytes_total=report.bytes_pulled))
            memories = {
                parcel.part: Memory(parcel.part, parcel.manifest, [parcel.fd])
                for parcel in fetched.parcels
            }
            for target, wanted in planned.wanted.items():
                await self._take(target, memories[target % parts], wanted)
        finally:
            fetched.close()

    def _sources(self, only: str) -> list[ParcelSource]:
        """Returns who may be asked: other instances, then the disk, unless one is named."""
        instance, config, ranks = self._instance, self._instance.config, self._instance.ranks

        async def read(part: int, manifest: Manifest, descriptor: int) -> Manifest:
            command = ReadUnits(config.model, manifest, config.read_limit_bytes_per_second)
            passed = {part: Passed(command, descriptor)}
            return (await self._bounded(ranks, passed, UnitsRead, manifest.weight_bytes)).manifest

        sources: list[ParcelSource] = []
        if only != DISK:
            relay = RelayParcels(instance.link, instance.open_link, instance.describe, only)
            sources.append(relay)
        if only in ("", DISK):
            sources.append(DiskParcels(config.model, read))
        return sources

    async def _take(self, target: int, memory: Memory, wanted: tuple[Wanted, ...]) -> int:
        ranks = self._instance.ranks
        if target >= self._first:
            ranks = self._fresh
            await self._started.wait()
        rank = target if target < self._first else target - self._first
        passed = {rank: Passed(TakeUnits(memory.manifest, wanted), memory.descriptors[0])}
        taken = await self._bounded(ranks, passed, Taken, _nbytes(memory.manifest, wanted))
        return taken.bytes_taken

    async def _bounded(
        self, group: RankGroup, passed: dict[int, Passed], kind: type[R], nbytes: int
    ) -> R:
        patience = self._instance.config.collective_timeout_seconds
        seconds = patience + nbytes / SLOWEST_BYTES_PER_SECOND
        return (await group.some(passed, kind, seconds=seconds))[0]


def _nbytes(manifest: Manifest, wanted: Sequence[Wanted]) -> int:
    names = {one.unit for one in wanted}
    return sum(unit.nbytes for unit in manifest.units if unit.name in names)
