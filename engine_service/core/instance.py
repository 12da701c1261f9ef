"""One life of an instance: its ranks and its weights. Plain Python.

Holds the parts and the steps; `bring_up` and `fill` put the steps in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_service.config import EngineConfig
from engine_service.core.check_report import CheckReport
from engine_service.core.engine import Engine
from engine_service.core.expert_map import ExpertMap
from engine_service.core.lifecycle import Lifecycle
from engine_service.core.load_report import LoadReport
from engine_service.core.membership import Membership, MembershipState, members_of
from engine_service.core.messages import Capture, Captured, Recorded, RecordProbe, Start
from engine_service.core.model_files import stated_dtype
from engine_service.core.pausing import Pauser
from engine_service.core.ports import ExpertRecovery, FillProgress, FillReport, OpenLink
from engine_service.core.rank_config import RankConfig
from engine_service.core.ranks import RankGroup
from engine_service.core.recovery_tally import RecoveryTally
from engine_service.core.relay_tie import RelayTie
from engine_service.core.replies import quiet
from engine_service.core.tokenizer import TextCodec
from engine_service.core.turn import Turn
from engine_service.core.update_request import UpdateProgress
from engine_service.core.version_history import VersionHistory
from engine_service.errors import ConfigError, NotReady
from relay_service.core.attachment import Attach
from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import Manifest, weights_digest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What an instance is called."""

    name: str
    generation: str
    model: str


class Instance(RelayTie):
    """The parts of an instance, and the steps of its life."""

    def __init__(
        self,
        config: EngineConfig,
        identity: Identity,
        ranks: RankGroup,
        engine: Engine,
        open_link: OpenLink,
    ) -> None:
        super().__init__(ranks, open_link)
        self.config = config
        self.identity = identity
        self.lifecycle = Lifecycle()
        self.engine = engine
        self.pauser = Pauser(engine, self.lifecycle, self._trim_memory)
        self.turn = Turn()
        """Of whoever changes the weights that serve."""
        self.history = VersionHistory()
        self.updating: Callable[[], UpdateProgress | None] = lambda: None
        """Says how far an update is, while there is one."""
        self.interrupt_update: Callable[[str], object] = lambda _reason: None
        """Ends an update that is not being applied, with a reason."""
        self.codec: TextCodec | None = None
        self.has_served = False
        """Whether it was ever ready."""
        self.manifests: list[Manifest] = []
        self.experts: ExpertMap | None = None
        """Where the experts lie; none for a model without, and before the ranks are up."""
        self.membership: Membership | None = None
        """Which ranks compute together; none for a model without experts, and before they do."""
        self.recovery: ExpertRecovery | None = None
        """Brings back what lost ranks held; none where ranks cannot be replaced."""
        self.recoveries = RecoveryTally()
        self.probe = b""
        self.fill_report: FillReport | None = None
        self.load_reports: list[LoadReport] = []
        """By rank, of weights from disk."""
        self.filling: FillProgress | None = None
        """How far a fill is, while there is one."""
        self.last_check: CheckReport | None = None
        """What was found when the weights were last checked, if ever."""
        self.reclaimed = False
        """Whether the first weights were those of the former life, which a relay kept."""
        self.touched = False
        """Whether anything but zeros may lie in the arenas."""
        self.files: dict[str, bytes] = {}
        """Small files of the model, by name; empty until they are known."""
        self._capturing: asyncio.Future[None] | None = None

    @property
    def format(self) -> Format | None:
        """What the bytes mean; none until the ranks are up."""
        return Format(self.ranks.arenas[0].facts) if self.ranks.arenas else None

    @property
    def placement(self) -> Placement:
        """Where the ranks lie."""
        parts = self.config.tensor_parallel_size
        if self.experts is None:
            return Placement(parts, self.config.expert_parallel_size)
        spare = self.experts.groups * self.experts.slots - self.experts.experts
        return Placement(parts, self.experts.groups, max(0, spare), self.experts.digest)

    @property
    def told_state(self) -> State:
        """What a relay is told: nobody is filled by an instance that has lost experts."""
        lost = self.experts is not None and bool(self.experts.lost)
        return State.UPDATING if lost and self.lifecycle.serves else self.lifecycle.state

    @property
    def progress(self) -> FillProgress | None:
        """How far it is with its weights, while it reads or is sent them."""
        if self.lifecycle.state is not State.LOADING:
            return self.filling
        each = [worker.progress for worker in self.ranks.workers]
        done, total = sum(done for done, _ in each), sum(total for _, total in each)
        return FillProgress(phase="loading", bytes_verified=done, bytes_total=total)

    def ready_codec(self) -> TextCodec:
        """Returns what makes tokens of text and back. Raises `NotReady` where nothing serves."""
        lifecycle = self.lifecycle
        if not lifecycle.serves or self.codec is None:
            reason = f": {lifecycle.reason}" if lifecycle.reason else ""
            raise NotReady(
                f"{self.identity.name} is {lifecycle.state}{reason}",
                field="state", expected="READY", found=str(lifecycle.state),
            )  # fmt: skip
        return self.codec

    async def allocate(self, files: dict[str, bytes]) -> None:
        """Has every rank allocate an arena of zeros, once. Raises `ModelError`."""
        if "config.json" not in files:
            raise ConfigError(
                f"{self.config.model} has no config.json", field="model",
                hint="name a model folder, or a --relay that offers a model",
            )  # fmt: skip
        former, self.files = self.files, files
        self.codec = TextCodec(files)
        if self.ranks.arenas:  # what was kept of a former life came to nothing
            if former["config.json"] != files["config.json"]:
                raise ConfigError("the arenas are those of another config.json", field="model")
            return
        with self.phases.measure("allocate"):
            await self.ranks.allocate(
                [Start(self.told(rank), files) for rank in range(len(self.ranks.workers))]
            )
        self._limit_context()
        self.manifests = [arena.manifest for arena in self.ranks.arenas]
        self.experts = self.ranks.arenas[0].experts
        if self.experts:
            members = members_of(self.ranks.workers, self.config.tensor_parallel_size)
            self.membership = Membership(epoch=1, state=MembershipState.WHOLE, members=members)

    async def capture(self) -> None:
        """Builds the model and captures it, once; whoever comes later waits for that."""
        if self._capturing is None:
            self._capturing = quiet(asyncio.ensure_future(self._capture()))
        await asyncio.shield(self._capturing)

    async def serve_from_disk(self) -> None:
        """Makes loaded weights serve, and records what a target must compute."""
        with self.phases.measure("probe"):
            self.probe = (await self.ranks.same(RecordProbe(), Recorded))[0].probe
        await self.serve(Weights(self.config.weight_version, weights_digest(self.manifests), 1))

    async def serve(self, weights: Weights) -> None:
        """Becomes ready with proven weights, and says so."""
        self.lifecycle.to(State.READY)
        self.has_served = True
        self.engine.weights = weights
        self.history.serve(weights, self._origin())
        _log.info("ready: %s, digest %s", weights.version, weights.digest)
        await self.tell_relay()

    async def fail(self, reason: str) -> None:
        """Gives up for good, and says so."""
        self.lifecycle.to(State.FAILED, reason)
        await self.tell_relay()

    def describe(self) -> Attach:
        """Describes the instance as it is now."""
        return Attach(
            instance=self.identity.name, generation=self.identity.generation,
            model=self.identity.model, state=self.told_state,
            format=Format(self.ranks.arenas[0].facts), placement=self.placement,
            weights=self.engine.weights, manifests=tuple(self.manifests),
            artifacts=self.files, probe=self.probe,
            descriptors_per_rank=self.ranks.arenas[0].descriptors, touched=self.touched,
            keep_seconds=self.config.keep_arena_seconds, started_as=self.config.started_as,
        )  # fmt: skip

    async def close(self) -> None:
        """Detaches and ends the ranks."""
        if self.link:
            await self.link.close()
        await self.ranks.stop()

    async def _capture(self) -> None:
        replies = await self.ranks.same(Capture(), Captured)
        imported = max(reply.imported_at for reply in replies)
        built = max(imported, *(reply.built_at for reply in replies))
        self.phases.add("imports", self.phases.origin, imported)
        self.phases.add("build", imported, built)
        self.phases.add("capture", built, time.monotonic())
        kind = "compiled ahead of time" if all(r.compiled for r in replies) else "captured"
        _log.info("the decode layer is %s", kind)

    async def _trim_memory(self) -> tuple[int, int]:
        return await self.ranks.trim_memory(self.config.patience_seconds)

    def _origin(self) -> str:
        """Says where the first weights came from."""
        if self.reclaimed:
            return "arena of the former life"
        if self.fill_report is None:
            return f"disk:{self.config.model}"
        path = self.fill_report.path
        return f"relay:{path[-1].source_instance if path else ''}"

    def _limit_context(self) -> None:
        """A model has positions for so many tokens and no more."""
        limits = self.engine.scheduler.limits
        most = min(arena.max_positions for arena in self.ranks.arenas)
        if most < limits.max_context_tokens:
            self.engine.scheduler.limits = dataclasses.replace(limits, max_context_tokens=most)

    def told(self, rank: int) -> RankConfig:
        """Returns what a rank is told at its start."""
        config = self.config
        dtype = stated_dtype(self.files) if config.dtype == "auto" else config.dtype
        return config.of_rank(rank, self.identity.generation, dtype)
