"""Takes an instance to READY, or to a dummy that waits. Plain Python.

disk     allocate → capture → load → probe recorded → READY
relay    allocate → (fill ‖ build, capture) → READY, within the deadline
neither  allocate → capture → DUMMY, until somebody fills it

Before all of them comes what a relay may have kept of the former life (`reclaim`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from engine_service.core.fill import Filler
from engine_service.core.instance import Instance
from engine_service.core.load_report import say_loaded
from engine_service.core.messages import LoadDisk, Loaded
from engine_service.core.model_files import choose_offer, read_folder
from engine_service.core.ports import FillProgress
from engine_service.core.reclaim import Reclaimer
from engine_service.errors import EngineError, FillFailed, FillTimeout, RelayUnreachable
from relay_service.core.instance import State
from relay_service.core.pull_report import PullOptions
from relay_service.core.together import jointly

RETRY_SECONDS = 0.5
OVERTIME_SECONDS = 2.0
"""Time for the relay to say, at the deadline, how far it came; longer it's not waited for."""
_log = logging.getLogger(__name__)


class BringUp:
    """One start of one instance."""

    def __init__(self, instance: Instance, filler: Filler) -> None:
        self._instance = instance
        self._filler = filler
        self._deadline = time.monotonic() + instance.config.deadline_seconds
        self._last_note = ""
        self._tried: dict[str, None] = {}
        """How earlier attempts ended, in their order and each once."""

    async def run(self) -> None:
        """Brings the instance up; whatever fails leaves it FAILED, with the reason."""
        config, instance = self._instance.config, self._instance
        try:
            if await Reclaimer(instance).run():
                await self._attach_serving()
            elif config.load_format == "disk":
                await self._from_disk()
            elif config.relay:
                await self._from_relay()
            else:
                await instance.allocate(self._folder_files())
                instance.lifecycle.to(State.DUMMY)
                await instance.capture()
        except EngineError as error:
            await self._fail(str(error))
        except Exception as error:
            _log.exception("whoever brings the instance up has failed")
            await self._fail(f"{type(error).__name__}: {error}")
            raise

    async def _fail(self, reason: str) -> None:
        if self._instance.lifecycle.state is not State.FAILED:
            await self._instance.fail(reason)

    async def _from_disk(self) -> None:
        instance = self._instance
        instance.lifecycle.to(State.LOADING)
        await instance.allocate(self._folder_files())
        await self._load()
        if instance.config.relay:
            await self._attach_serving()

    async def _attach_serving(self) -> None:
        try:
            await self._instance.attach(self._instance.config.relay)
        except RelayUnreachable as error:
            # A seed serves whether or not its relay is there; the link keeps trying.
            _log.warning("not attached yet: %s", error)

    async def _load(self) -> None:
        """Reads the weights from the model folder. Raises `CheckpointError`."""
        instance, config = self._instance, self._instance.config
        await instance.capture()  # first: a model that cannot serve need not be read
        command = LoadDisk(
            config.model,
            narrow=config.dtype != "auto",  # then nobody has asked for a narrower type
            bytes_per_second=config.read_limit_bytes_per_second,
        )
        began = time.monotonic()
        with instance.phases.measure("load"):
            replies = await instance.ranks.same(command, Loaded)
        instance.manifests = [reply.manifest for reply in replies]
        instance.load_reports = [reply.report for reply in replies]
        say_loaded(instance.identity.name, instance.load_reports, time.monotonic() - began)
        await instance.serve_from_disk()

    async def _from_relay(self) -> None:
        instance = self._instance
        await instance.allocate(await self._files_in_time())
        instance.lifecycle.to(State.DUMMY)
        try:
            async with asyncio.timeout(self._seconds_left + OVERTIME_SECONDS):
                await jointly(instance.capture(), self._fill())
        except EngineError as error:
            await self._fall_back(error)
        except TimeoutError:
            await self._fall_back(self._too_late(f"still {instance.lifecycle.state}"))

    async def _fall_back(self, error: Exception) -> None:
        """Loads from disk where the operator allows it; otherwise raises what went wrong."""
        instance = self._instance
        if instance.config.fallback != "disk" or instance.lifecycle.state is not State.DUMMY:
            raise error
        _log.warning("falling back to disk: %s", error)
        instance.lifecycle.to(State.LOADING, f"fallback to disk: {error}")
        if instance.link:
            await instance.take_back(instance.link)
            await instance.tell_relay()
        await self._load()

    async def _fill(self) -> None:
        """Fills from a source that may come up later; tries again while there is time."""
        config = self._instance.config
        while True:
            options = PullOptions(
                source_instance=config.source, transport=config.transport,
                rate_limit_bytes_per_second=config.rate_limit_bytes_per_second,
                timeout_seconds=self._seconds_left,
            )  # fmt: skip
            try:
                await self._filler.fill(config.relay, options, self._note)
            except (FillFailed, RelayUnreachable) as error:
                reason = error.details.get("path") or str(error)
                if isinstance(error, FillTimeout) or self._seconds_left < RETRY_SECONDS:
                    raise self._too_late(reason) from error
                if error.details.get("final"):
                    raise
                self._tried[reason] = None
                _log.warning("fill: %s; trying again", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    def _folder_files(self) -> dict[str, bytes]:
        with self._instance.phases.measure("config"):
            return read_folder(Path(self._instance.config.model))

    async def _files_in_time(self) -> dict[str, bytes]:
        try:
            with self._instance.phases.measure("config"):
                async with asyncio.timeout(self._seconds_left):
                    return await self._files()
        except TimeoutError:
            raise self._too_late(f"no model was offered; {self._last_note}") from None

    async def _files(self) -> dict[str, bytes]:
        """Reads the folder's small files, or takes those of an instance that offers a model."""
        instance, config = self._instance, self._instance.config
        folder = Path(config.model)
        files = read_folder(folder) if folder.is_dir() else {}
        if "config.json" in files:
            return files
        link = instance.link_to(config.relay)
        while True:
            try:
                known = await link.offers()
                if offer := choose_offer(known, config.source):
                    return await link.fetch(offer, known)
            except RelayUnreachable as error:
                self._note(FillProgress(phase="matching", note=str(error)))
            await asyncio.sleep(RETRY_SECONDS)

    def _too_late(self, reason: str) -> FillTimeout:
        seconds = self._instance.config.deadline_seconds
        story = "; then ".join(self._tried | {reason: None})
        return FillTimeout(f"not filled within {seconds:g} s of its start: {story}")

    def _note(self, progress: FillProgress) -> None:
        """Logs what a fill waits for, once, and lets the status say it."""
        if progress.note and progress.note != self._last_note:
            self._last_note = self._instance.lifecycle.reason = progress.note
            _log.info("fill: %s", progress.note)

    @property
    def _seconds_left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())
