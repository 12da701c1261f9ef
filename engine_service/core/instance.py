"""Brings an instance up: from disk, or from one that serves. Plain Python.

    disk    ranks → load → capture → probe recorded → READY
    relay   ranks → attach → (land ‖ capture) → mapping returned → commit → probe → READY

Whatever fails before READY leaves a dummy or a failed instance, never one that
serves something else than verified weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from engine_service.config import EngineConfig
from engine_service.core.engine import Engine
from engine_service.core.lifecycle import Lifecycle
from engine_service.core.messages import (
    Capture,
    CheckProbe,
    Commit,
    Done,
    LoadDisk,
    Loaded,
    RankConfig,
    Recorded,
    RecordProbe,
    Start,
)
from engine_service.core.model_files import choose_offer, read_folder
from engine_service.core.phases import Phases
from engine_service.core.ports import FillProgress, FillReport, OnProgress, OpenLink, RelayLink
from engine_service.core.ranks import RankGroup, quiet
from engine_service.core.tokenizer import TextCodec, read_json
from engine_service.errors import (
    ConfigError,
    EngineError,
    FillFailed,
    FillTimeout,
    RelayUnreachable,
    WrongState,
)
from relay_service.core.attachment import Attach
from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.pull import PullOptions

RETRY_SECONDS = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What an instance is called."""

    name: str
    generation: str
    model: str


class InstanceRuntime:
    """One life of an instance: its ranks, its weights, its tie to a relay."""

    def __init__(
        self,
        config: EngineConfig,
        identity: Identity,
        ranks: RankGroup,
        engine: Engine,
        open_link: OpenLink,
    ) -> None:
        self.config = config
        self.identity = identity
        self.lifecycle = Lifecycle()
        self.ranks = ranks
        self.engine = engine
        self.phases = Phases()
        self.codec: TextCodec | None = None
        self.manifests: list[Manifest] = []
        self.link: RelayLink | None = None
        self.fill_report: FillReport | None = None
        self._open_link = open_link
        self._files: dict[str, bytes] = {}
        self._probe = b""
        self._filling = asyncio.Lock()
        self._capturing: asyncio.Future[None] | None = None
        self._source_instance = config.source
        self._last_note = ""

    @property
    def format(self) -> Format | None:
        """What the bytes mean; none until the ranks are up."""
        return Format(self.ranks.arenas[0].facts) if self.ranks.arenas else None

    @property
    def placement(self) -> Placement:
        """Where the ranks lie."""
        return Placement(tensor_parallel_size=self.config.tensor_parallel_size)

    async def bring_up(self) -> None:
        """Takes the instance to READY, or to a DUMMY that waits; FAILED says why not."""
        try:
            if self.config.load_format == "disk":
                await self._from_disk()
            elif self.config.relay:
                await self._from_relay()
            else:
                await self._allocate(read_folder(Path(self.config.model)))
                self.lifecycle.to(State.DUMMY)
                await self._capture()
        except EngineError as error:
            _log.error("start failed: %s", error)
            self.lifecycle.to(State.FAILED, str(error))
            await self._tell_relay()

    async def fill(self, relay: str, options: PullOptions, on_progress: OnProgress) -> FillReport:
        """Fills this dummy through the relay of its host, and makes it ready.

        Raises `WrongState` when it isn't a dummy, `FillFailed` when it stays one.
        """
        if self._filling.locked() or self.lifecycle.state is not State.DUMMY:
            raise WrongState(
                f"{self.identity.name} is {self.lifecycle.state}: only a dummy can be filled",
                field="state", expected="DUMMY", found=str(self.lifecycle.state),
            )  # fmt: skip
        async with self._filling:
            on_progress(FillProgress(phase="attaching"))
            await self._attach(relay)
            report = await self._land(options, on_progress)
            await self._capture()
            await self._commit(report, on_progress)
            return report

    async def close(self) -> None:
        """Detaches and ends the ranks."""
        if self.link:
            await self.link.close()
        await self.ranks.stop()

    async def _from_disk(self) -> None:
        self.lifecycle.to(State.LOADING)
        await self._allocate(read_folder(Path(self.config.model)))
        await self._load()
        await self._capture()
        await self._become_ready_from_disk()
        if self.config.relay:
            # A seed serves whether or not its relay is there; the link keeps trying.
            with contextlib.suppress(RelayUnreachable):
                await self._attach(self.config.relay)

    async def _from_relay(self) -> None:
        """Fills itself within the deadline, from a source that may come up later."""
        deadline = time.monotonic() + self.config.deadline_seconds
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + _left(deadline)):
                files = await self._own_or_offered_files()
        except TimeoutError:
            raise FillTimeout(
                f"no model was offered within {self.config.deadline_seconds:g} s", field="deadline"
            ) from None
        await self._allocate(files)
        self.lifecycle.to(State.DUMMY)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._capture())
                group.create_task(self._fill_until(deadline))
        except* EngineError as errors:
            if self.config.fallback != "disk" or self.lifecycle.state is not State.DUMMY:
                raise errors.exceptions[0] from None
            _log.warning("falling back to disk: %s", errors.exceptions[0])
            self.lifecycle.to(State.LOADING, f"fallback to disk: {errors.exceptions[0]}")
        if self.lifecycle.state is State.LOADING:
            await self._take_back_mapping()
            await self._load()
            await self._capture()
            await self._become_ready_from_disk()

    async def _fill_until(self, deadline: float) -> None:
        while True:
            options = PullOptions(
                source_instance=self._source_instance, transport=self.config.transport,
                rate_limit_bytes_per_second=self.config.rate_limit_bytes_per_second,
                timeout_seconds=_left(deadline),
            )  # fmt: skip
            try:
                await self.fill(self.config.relay, options, self._log_progress)
            except (FillFailed, RelayUnreachable) as error:
                retry = not error.details.get("final") and _left(deadline) > RETRY_SECONDS
                if not retry:
                    raise
                _log.warning("fill: %s; trying again", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _own_or_offered_files(self) -> dict[str, bytes]:
        folder = Path(self.config.model)
        files = read_folder(folder) if folder.is_dir() else {}
        if "config.json" in files and not self.config.source:
            return files
        link = self._link_to(self.config.relay)
        while True:
            try:
                offer = choose_offer(await link.offers(), self.config.source)
                if offer:
                    # A name may be of a model; the pull wants the instance.
                    self._source_instance = offer.instance if self.config.source else ""
                    if "config.json" in files:
                        return files
                    self.identity = dataclasses.replace(self.identity, model=offer.model)
                    return await link.fetch(offer)
            except RelayUnreachable as error:
                _log.warning("%s", error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _allocate(self, files: dict[str, bytes]) -> None:
        if "config.json" not in files:
            raise ConfigError(
                f"{self.config.model} has no config.json", field="model",
                hint="name a model folder, or a --relay that offers a model",
            )  # fmt: skip
        self._files = files
        self.codec = TextCodec(files)
        with self.phases.measure("allocate"):
            await self.ranks.allocate(
                [Start(self._rank_config(rank), files) for rank in range(len(self.ranks.workers))]
            )
        self.manifests = [arena.manifest for arena in self.ranks.arenas]
        self._limit_context()

    def _limit_context(self) -> None:
        """A model has positions for so many tokens and no more."""
        most = read_json(self._files, "config.json").get("max_position_embeddings")
        limits = self.engine.scheduler.limits
        if isinstance(most, int) and most < limits.max_context_tokens:
            self.engine.scheduler.limits = dataclasses.replace(limits, max_context_tokens=most)

    def _rank_config(self, rank: int) -> RankConfig:
        config = self.config
        dtype = config.dtype
        if dtype == "auto":
            stated = read_json(self._files, "config.json")
            dtype = str(stated.get("torch_dtype") or stated.get("dtype") or "float32")
        return RankConfig(
            rank=rank, world_size=config.tensor_parallel_size,
            generation=self.identity.generation, dtype=dtype, device=config.device,
            threads=config.threads_per_rank, kv_block_tokens=config.kv_block_tokens,
            kv_blocks=config.kv_blocks, max_running=config.max_running,
        )  # fmt: skip

    async def _load(self) -> None:
        with self.phases.measure("load"):
            replies = await self.ranks.same(LoadDisk(self.config.model), Loaded)
        self.manifests = [reply.manifest for reply in replies]

    async def _capture(self) -> None:
        """Captures once; whoever comes later waits for the same capture."""
        if self._capturing is None:
            self._capturing = quiet(asyncio.ensure_future(self._capture_once()))
        await asyncio.shield(self._capturing)

    async def _capture_once(self) -> None:
        with self.phases.measure("capture"):
            await self.ranks.same(Capture(), Done)

    async def _become_ready_from_disk(self) -> None:
        with self.phases.measure("probe"):
            self._probe = (await self.ranks.same(RecordProbe(), Recorded))[0].probe
        self._serve(Weights(self.config.weight_version, weights_digest(self.manifests), 1))
        await self._tell_relay()

    async def _land(self, options: PullOptions, on_progress: OnProgress) -> FillReport:
        link = self._link_to(self.link.address if self.link else "")
        self.lifecycle.to(State.LANDING)
        try:
            await link.update()
            with self.phases.measure("land"):
                report = await link.pull(options, on_progress)
            on_progress(FillProgress(phase="committing"))
            began = time.monotonic()
            await link.return_mapping()
            landed = await self._landed(link, report)
        except BaseException:
            self.lifecycle.to(State.DUMMY)
            await link.update()
            raise
        self.manifests = landed
        report.seconds_commit = time.monotonic() - began
        return report

    async def _landed(self, link: RelayLink, report: FillReport) -> list[Manifest]:
        manifests = await link.manifests(len(self.manifests))
        if weights_digest(manifests) != report.weights_digest:
            raise FillFailed("the relay's manifests are not of the weights that it reports")
        return manifests

    async def _commit(self, report: FillReport, on_progress: OnProgress) -> None:
        """Makes landed weights serve. A failure here is the end: the arena is no dummy any more."""
        try:
            began = time.monotonic()
            with self.phases.measure("commit"):
                await self.ranks.same(Commit(), Done)
            report.seconds_commit += time.monotonic() - began
            on_progress(FillProgress(phase="probing"))
            began = time.monotonic()
            with self.phases.measure("probe"):
                await self._prove(report.probe)
            report.seconds_probe = time.monotonic() - began
        except EngineError as error:
            self.lifecycle.to(State.FAILED, str(error))
            await self._tell_relay()
            raise
        self.fill_report = report
        self._serve(Weights(report.weight_version, report.weights_digest, 1))
        await self._tell_relay()

    async def _prove(self, probe: bytes) -> None:
        if not probe:
            raise FillFailed("the source has no probe to compare with", final="yes")
        await self.ranks.same(CheckProbe(probe), Done)
        self._probe = probe

    def _serve(self, weights: Weights) -> None:
        self.engine.weights = weights
        self.lifecycle.to(State.READY)
        _log.info("ready: %s, digest %s", weights.version, weights.digest)

    async def _attach(self, relay: str) -> None:
        link = self._link_to(relay)
        try:
            with self.phases.measure("attach"):
                await link.attach(self._describe, self.ranks.descriptors)
        except ConfigError:
            # Denied for good; another relay may still be named.
            await link.close()
            self.link = None
            raise

    def _describe(self) -> Attach:
        return Attach(
            instance=self.identity.name, generation=self.identity.generation,
            model=self.identity.model, state=self.lifecycle.state,
            format=Format(self.ranks.arenas[0].facts), placement=self.placement,
            weights=self.engine.weights, manifests=tuple(self.manifests),
            artifacts=self._files, probe=self._probe,
        )  # fmt: skip

    def _link_to(self, relay: str) -> RelayLink:
        if self.link is None:
            self.link = self._open_link(relay)
        elif self.link.address != relay:
            raise WrongState(
                f"attached to {self.link.address} already",
                field="relay", expected=self.link.address, found=relay,
            )  # fmt: skip
        return self.link

    async def _take_back_mapping(self) -> None:
        if self.link:
            await self.link.return_mapping()
            await self.link.update()

    async def _tell_relay(self) -> None:
        if self.link:
            await self.link.update()

    def _log_progress(self, progress: FillProgress) -> None:
        if progress.note and progress.note != self._last_note:
            _log.info("fill: %s", progress.note)
            self._last_note = progress.note
            if self.lifecycle.state is State.LANDING:
                self.lifecycle.reason = progress.note


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
