"""The engine's connection to the relay of its host: gRPC, beside the attachment socket."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from clients.credentials import NOTHING, Credentials
from clients.errors import ClientError, Unreachable
from clients.relay import RelayClient
from engine_service.core.ports import FillReport, OnProgress
from engine_service.errors import FillFailed, FillTimeout, RelayUnreachable
from engine_service.rpc import convert, reclaiming
from engine_service.rpc.attachment import Attachment
from engine_service.rpc.reclaiming import KeptArenas
from relay_service.core.attachment import ARTIFACT_NAMES, MAX_ARTIFACT_BYTES, Attach
from relay_service.core.instance import Artifact, Instance, verified_digest
from relay_service.core.layout import check
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.match import Target
from relay_service.core.patience import Patience
from relay_service.core.pull_report import PullOptions
from seedrelay.v1 import relay_pb2, weights_pb2

RETURN_SECONDS = 5.0
SILENCE_SECONDS = 10.0
"""A relay that says for so long not how far a pull is, is taken for away.

It says so ten times a second.
"""
MAX_HOLDERS = 4
"""Instances that are asked for the same small files before that is given up."""
TEMPORARY = frozenset({"WrongState", "LeaseEnded", "EpochChanged"})
"""Refusals of a relay that may be over at the next try."""
_log = logging.getLogger(__name__)


class GrpcRelayLink:
    """Implements the engine's `RelayLink` port."""

    def __init__(self, address: str, credentials: Credentials = NOTHING) -> None:
        self.address = address
        self._credentials = credentials
        self._relay = RelayClient(address, credentials)
        self._attachment = Attachment(self._relay)
        self._staging = asyncio.Lock()

    async def offers(self) -> list[Instance]:
        """Lists every instance of the fleet."""
        try:
            return [match.instance for match in await self._relay.sources(Target())]
        except ClientError as error:
            raise RelayUnreachable(str(error)) from error

    async def manifests_of(self, instance: Instance) -> list[Manifest]:
        """Returns an instance's manifests from the relay that announced it."""
        async with RelayClient(instance.address, self._credentials) as relay:
            found = await _manifests(
                relay, instance.instance, instance.generation, len(instance.ranks)
            )
        if not verified_digest(found, instance.weights.digest):
            raise RelayUnreachable(
                f"{instance.instance} holds other weights than it announced by now",
                hint="try again",
            )
        return found

    async def fetch(self, instance: Instance, others: Sequence[Instance] = ()) -> dict[str, bytes]:
        """Fetches an instance's small files, or the very same ones from those who hold them too."""
        wanted = {one.name: one for one in instance.artifacts if one.name in ARTIFACT_NAMES}
        files: dict[str, bytes] = {}
        failure = RelayUnreachable(f"{instance.instance} gives no files")
        twins = [one for one in others if one.instance != instance.instance]
        for holder in [instance, *_with_any(twins, wanted.values())][:MAX_HOLDERS]:
            async with RelayClient(holder.address, self._credentials) as relay:
                for name, artifact in wanted.items():
                    if name in files or artifact not in holder.artifacts:
                        continue
                    try:
                        files[name] = await _fetch(relay, artifact)
                    except RelayUnreachable as error:
                        failure = error
                        _log.warning("%s: %s", holder.instance, error)
        if len(files) < len(wanted):
            raise failure
        return files

    async def kept(self, instance: str, started_as: str) -> KeptArenas | None:
        """Returns what was kept for the instance, if anything was."""
        return await reclaiming.ask(self._relay, instance, started_as)

    async def attach(
        self, describe: Callable[[], Attach], descriptors: Callable[[], list[int]]
    ) -> None:
        """Attaches and keeps attached."""
        await self._attachment.attach(describe, descriptors)

    async def update(self) -> None:
        """Tells the relay how the instance changed."""
        await self._attachment.update()

    async def closing(self, version: str, *, ends_leases: bool = False) -> Sequence[str]:
        """Says that other weights will serve soon; returns who reads the present ones."""
        return await self._attachment.closing(version, ends_leases=ends_leases)

    async def pull(self, options: PullOptions, on_progress: OnProgress) -> FillReport:
        """Has the arenas filled."""
        last = None
        try:
            async with contextlib.aclosing(self._messages(options)) as messages:
                async for last in messages:
                    on_progress(convert.progress_from_proto(last.progress))
        except TimeoutError:
            self.detach()
            raise RelayUnreachable(
                _lost(last, f"{self.address} said nothing for {SILENCE_SECONDS:g} s")
            ) from None
        except Unreachable as error:
            raise RelayUnreachable(_lost(last, str(error))) from error
        except ClientError as error:
            raise _fill_failed(error) from error
        if last is None or not last.HasField("report"):
            raise FillFailed("the relay ended the pull without a report")
        return _report(last)

    async def stage(
        self, descriptors: list[list[int]], options: PullOptions, on_progress: OnProgress
    ) -> tuple[FillReport, list[Manifest]]:
        """Has memory filled that is lent for it, beside what serves."""
        async with self._staging:
            await self._attachment.lend(descriptors)
            serves = self._attachment.describe().manifests
            try:
                report = await self.pull(options, on_progress)
                landed = await self.manifests(len(descriptors), staged=True)
            finally:
                await self._take_back()
        _check_staged(report, landed, serves)
        return report, landed

    async def source_files(self, report: FillReport) -> dict[str, bytes]:
        """Fetches the small files of the instance that weights came from."""
        name, known = report.path[-1].source_instance, await self.offers()
        for source in map(Instance.as_source, known):
            same = source.weights.digest == report.source_weights_digest
            if source.instance == name and same:
                return await self.fetch(source, known)
        raise FillFailed(f"{name} has other weights by now, or has gone", source=name)

    async def return_mapping(self) -> bool:
        """Has the relay give up writing; a relay that is dead has done so."""
        now = self._attachment.describe()
        try:
            await self._relay.return_mapping(now.instance, now.generation, RETURN_SECONDS)
        except ClientError as error:
            # A relay that was started anew maps nothing of ours, and a dead one nothing at all.
            return self._attachment.relay_died or error.code == "NOT_FOUND"
        return True

    def detach(self) -> None:
        """Drops the attachment, which is made anew."""
        self._attachment.detach()

    async def manifests(self, ranks: int, *, staged: bool = False) -> list[Manifest]:
        """Returns what has landed, by rank."""
        now = self._attachment.describe()
        return await _manifests(self._relay, now.instance, now.generation, ranks, staged=staged)

    async def close(self) -> None:
        """Detaches."""
        await self._attachment.close()
        await self._relay.close()

    async def _take_back(self) -> None:
        """Has lent memory given back, or cuts the relay off."""
        returned = False
        try:
            returned = await self.return_mapping()
        finally:
            if not returned:
                _log.warning("the relay did not give lent memory back: what lies there may change")
                self.detach()

    async def _messages(self, options: PullOptions) -> AsyncGenerator[relay_pb2.PullResponse]:
        """Streams a pull. Raises `TimeoutError` when the relay falls silent."""
        name = self._attachment.describe().instance
        asked = self._relay.pull(name, convert.options_to_proto(options))
        async with contextlib.aclosing(asked) as answers, Patience(SILENCE_SECONDS) as patience:
            while message := await patience.wait(anext(answers, None)):
                yield message


def _with_any(holders: Sequence[Instance], wanted: Collection[Artifact]) -> list[Instance]:
    return [one for one in holders if any(artifact in one.artifacts for artifact in wanted)]


async def _fetch(relay: RelayClient, artifact: Artifact) -> bytes:
    """Fetches a file of at most the announced size. Raises `RelayUnreachable` for any other."""
    try:
        data = await relay.artifact(artifact.sha256, min(artifact.nbytes, MAX_ARTIFACT_BYTES))
    except (ClientError, ValueError) as error:
        raise RelayUnreachable(f"{artifact.name}: {error}") from error
    if hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise RelayUnreachable(f"{artifact.name} does not match its SHA-256")
    return data


async def _manifests(
    relay: RelayClient, instance: str, generation: str, ranks: int, *, staged: bool = False
) -> list[Manifest]:
    """Returns checked manifests, by rank."""
    try:
        found = [
            await relay.manifest(instance, generation, rank, staged=staged) for rank in range(ranks)
        ]
    except (ClientError, ValueError) as error:
        raise RelayUnreachable(str(error)) from error
    for manifest in found:
        check(manifest)
    return found


def _fill_failed(error: ClientError) -> FillFailed:
    """Says whether trying again could help: a source that does not fit never will."""
    kind = FillTimeout if error.code == "DEADLINE_EXCEEDED" else FillFailed
    passes = error.code in ("UNAVAILABLE", "NOT_FOUND", "CANCELLED") or error.reason in TEMPORARY
    final = "" if passes else "yes"
    return kind(error.message, **{**error.details, "final": final, "status": error.code})


def _check_staged(
    report: FillReport, landed: Sequence[Manifest], serves: Sequence[Manifest]
) -> None:
    """Raises `FillFailed` for manifests that are not of the weights that were announced."""
    for old, new in zip(serves, landed, strict=True):
        if difference := old.layout_difference(new):
            raise FillFailed(f"what was staged lies otherwise than what serves: {difference}")
    digest = weights_digest(list(landed))
    announced = digest if report.path[-1].recut else report.source_weights_digest
    if not digest or {digest} != {report.weights_digest, announced}:
        raise FillFailed("the relay's manifests are not of the weights that it reports")


def _lost(last: relay_pb2.PullResponse | None, reason: str) -> str:
    at = last.progress if last else weights_pb2.PullProgress()
    source = f" from {at.source_instance} ({at.transport})" if at.source_instance else ""
    return f"the relay was lost during the pull{source}: {reason}"


def _report(last: relay_pb2.PullResponse) -> FillReport:
    report = convert.report_from_proto(last.report)
    report.probe = last.probe
    return report
