"""Fills a dummy through the relay of its host, and makes it ready. Plain Python.

    attach → land (while graphs are captured) → mapping returned → commit → probe → READY

What fails before the commit leaves a dummy. What fails after it leaves a failed
instance: the arena holds something, and it is not proven.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from engine_service.core.fill_log import FillLog
from engine_service.core.instance import Instance
from engine_service.core.messages import CheckProbe, Commit, Done
from engine_service.core.ports import FillProgress, FillReport, OnProgress, RelayLink
from engine_service.core.replies import quiet
from engine_service.errors import (
    ArenaError,
    EngineError,
    FillFailed,
    RelayUnreachable,
    WrongState,
)
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.pull_report import PullOptions


class Filler:
    """Fills one instance, one fill at a time."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._filling = asyncio.Lock()

    async def fill(self, relay: str, options: PullOptions, on_progress: OnProgress) -> FillReport:
        """Fills the dummy; returns once it is ready.

        Raises `WrongState` when it isn't a dummy, `FillFailed` or `RelayUnreachable`
        when it stays one, `ProbeMismatch` or `ArenaError` when it is lost.
        """
        instance = self._instance
        if self._filling.locked() or instance.lifecycle.state is not State.DUMMY:
            raise WrongState(
                f"{instance.identity.name} is {instance.lifecycle.state}: "
                "only a dummy can be filled",
                field="state", expected="DUMMY", found=str(instance.lifecycle.state),
            )  # fmt: skip
        async with self._filling:

            def note(progress: FillProgress) -> None:
                instance.filling = progress
                on_progress(progress)

            log = FillLog(instance.identity.name, relay, note)
            try:
                report = await self._fill(relay, options, log)
            except BaseException as error:
                log.failed(error)
                raise
            finally:
                instance.filling = None
            log.done(report)
            return report

    async def _fill(self, relay: str, options: PullOptions, on_progress: OnProgress) -> FillReport:
        on_progress(FillProgress(phase="attaching"))
        if self._instance.link and self._instance.link.address != relay:
            await self._instance.leave_relay()  # an earlier pull named another one
        link = await self._attach(relay)
        report = await self._land(link, options, on_progress)
        await self._instance.capture()
        # A caller who leaves now cannot stop what has begun to serve.
        await asyncio.shield(quiet(asyncio.ensure_future(self._commit(link, report, on_progress))))
        return report

    async def _attach(self, relay: str) -> RelayLink:
        try:
            return await self._instance.attach(relay)
        except RelayUnreachable:
            if relay != self._instance.config.relay:
                await self._instance.leave_relay()
            raise

    async def _land(
        self, link: RelayLink, options: PullOptions, on_progress: OnProgress
    ) -> FillReport:
        instance = self._instance
        instance.lifecycle.to(State.LANDING)
        try:
            await link.update()
            instance.lent = instance.touched = True
            with instance.phases.measure("land"):
                report = await link.pull(options, on_progress)
            on_progress(FillProgress(phase="committing"))
            instance.manifests = await self._landed(link, report)
        except BaseException:
            if instance.lifecycle.state is State.LANDING:  # it may be told to stop, or have failed
                instance.lifecycle.to(State.DUMMY)
                await link.update()
            raise
        return report

    async def _landed(self, link: RelayLink, report: FillReport) -> list[Manifest]:
        manifests = await link.manifests(len(self._instance.manifests))
        if weights_digest(manifests) != report.weights_digest:
            raise FillFailed("the relay's manifests are not of the weights that it reports")
        return manifests

    async def _commit(self, link: RelayLink, report: FillReport, on_progress: OnProgress) -> None:
        instance = self._instance
        try:
            began = time.monotonic()
            with instance.phases.measure("commit"):
                self._check_moved(await instance.take_back(link))
                await instance.ranks.same(Commit(), Done)
            report.seconds_commit = time.monotonic() - began
            on_progress(FillProgress(phase="probing"))
            began = time.monotonic()
            with instance.phases.measure("probe"):
                await self._prove(report.probe)
            report.seconds_probe = time.monotonic() - began
        except EngineError as error:
            await instance.fail(str(error))
            raise
        instance.fill_report = report
        # What it is now called is what the source calls it, whatever folder it started from.
        instance.identity = dataclasses.replace(instance.identity, model=report.model)
        await instance.serve(Weights(report.weight_version, report.weights_digest, 1))

    def _check_moved(self, moved: list[Manifest]) -> None:
        if moved and weights_digest(moved) != weights_digest(self._instance.manifests):
            raise ArenaError("the weights were changed while the relay was cut off")

    async def _prove(self, probe: bytes) -> None:
        if not probe:
            raise FillFailed("the source has no probe to compare with", final="yes")
        await self._instance.ranks.same(CheckProbe(probe), Done)
        self._instance.probe = probe
