"""The engine's connection to the relay of its host: gRPC, and the attachment socket."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from clients.credentials import NOTHING, Credentials
from clients.errors import ClientError, Unreachable
from clients.relay import RelayClient
from engine_service.core.ports import FillReport, OnProgress
from engine_service.errors import ConfigError, FillFailed, FillTimeout, RelayUnreachable
from engine_service.rpc import convert
from relay_service.core.attachment import (
    ARTIFACT_NAMES,
    MAX_ARTIFACT_BYTES,
    Attach,
    Denied,
    Update,
    decode_to_engine,
    encode,
)
from relay_service.core.channel import AsyncChannel, ChannelClosed
from relay_service.core.instance import Instance
from relay_service.core.layout import check
from relay_service.core.manifest import Manifest
from relay_service.core.match import Target
from relay_service.core.pull_report import PullOptions
from seedrelay.v1 import relay_pb2

REATTACH_SECONDS = 0.5
RETURN_SECONDS = 10.0
ANSWER_SECONDS = 5.0
"""A relay that answers nothing for so long is taken for away."""
_log = logging.getLogger(__name__)


class GrpcRelayLink:
    """Implements the engine's `RelayLink` port."""

    def __init__(self, address: str, credentials: Credentials = NOTHING) -> None:
        self.address = address
        self._credentials = credentials
        self._relay = RelayClient(address, credentials)
        self._channel: AsyncChannel | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[Denied | None] = asyncio.Queue()
        self._telling = asyncio.Lock()
        self._relay_pid = 0

    async def offers(self) -> list[Instance]:
        """Lists every instance of the fleet."""
        try:
            return [match.instance for match in await self._relay.sources(Target())]
        except ClientError as error:
            raise RelayUnreachable(str(error)) from error

    async def fetch(self, instance: Instance) -> dict[str, bytes]:
        """Fetches an instance's small files from the relay that announced it."""
        files: dict[str, bytes] = {}
        async with RelayClient(instance.address, self._credentials) as relay:
            for artifact in instance.artifacts:
                if artifact.name not in ARTIFACT_NAMES:
                    continue
                try:
                    data = await relay.artifact(artifact.sha256, MAX_ARTIFACT_BYTES)
                except (ClientError, ValueError) as error:
                    raise RelayUnreachable(f"{artifact.name}: {error}") from error
                if hashlib.sha256(data).hexdigest() != artifact.sha256:
                    raise RelayUnreachable(f"{artifact.name} does not match its SHA-256")
                files[artifact.name] = data
        return files

    async def attach(self, describe: Callable[[], Attach], descriptors: list[int]) -> None:
        """Attaches and keeps attached."""
        if self._channel is not None:
            return
        self._describe, self._descriptors = describe, descriptors
        try:
            await self._connect()
        finally:
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())

    async def update(self) -> None:
        """Tells the relay how the instance changed."""
        async with self._telling:
            if self._channel is None:
                return
            now = self._describe()
            message = Update(
                model=now.model,
                state=now.state,
                weights=now.weights,
                manifests=now.manifests,
                probe=now.probe,
            )
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._channel.send(encode(message))
                    if denied := await self._answers.get():
                        _log.error("the relay denied an update: %s", denied.reason)
            except ChannelClosed:
                pass  # it hears of it when the link has attached again
            except TimeoutError:
                _log.warning("relay %s does not answer", self.address)
                self.detach()

    async def pull(self, options: PullOptions, on_progress: OnProgress) -> FillReport:
        """Has the arenas filled."""
        now, last = self._describe(), None
        try:
            async for last in self._relay.pull(now.instance, convert.options_to_proto(options)):
                on_progress(convert.progress_from_proto(last.progress))
        except Unreachable as error:
            raise RelayUnreachable(f"the relay was lost during the pull: {error}") from error
        except ClientError as error:
            raise _fill_failed(error) from error
        if last is None or not last.HasField("report"):
            raise FillFailed("the relay ended the pull without a report")
        return _report(last)

    async def return_mapping(self) -> bool:
        """Has the relay give up writing; a relay that is dead has done so."""
        now = self._describe()
        try:
            await self._relay.return_mapping(now.instance, now.generation, RETURN_SECONDS)
        except ClientError as error:
            # A relay that was started anew maps nothing of ours, and a dead one nothing at all.
            gone = bool(self._relay_pid) and not Path(f"/proc/{self._relay_pid}").exists()
            return gone or error.code == "NOT_FOUND"
        return True

    def detach(self) -> None:
        """Drops the connection; `_keep` attaches again."""
        self._disconnect()

    async def manifests(self, ranks: int) -> list[Manifest]:
        """Returns what has landed, by rank."""
        now = self._describe()
        try:
            landed = [
                await self._relay.manifest(now.instance, now.generation, rank)
                for rank in range(ranks)
            ]
        except (ClientError, ValueError) as error:
            raise RelayUnreachable(str(error)) from error
        for manifest in landed:
            check(manifest)
        return landed

    async def close(self) -> None:
        """Detaches."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        self._disconnect()
        await self._relay.close()

    async def _connect(self) -> None:
        try:
            path, _ = await self._relay.attachment()
        except ClientError as error:
            raise RelayUnreachable(str(error)) from error
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = AsyncChannel(sock)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.get_running_loop().sock_connect(sock, path)
                await self._introduce(channel)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            channel.close()
            raise RelayUnreachable(f"cannot attach to {self.address}: {error}") from error
        except BaseException:
            channel.close()
            raise
        self._channel = channel
        _log.info("attached to relay %s", self.address)

    async def _introduce(self, channel: AsyncChannel) -> None:
        self._relay_pid, uid = channel.peer_credentials()
        if uid != os.getuid():
            raise ConfigError(f"the relay at {self.address} runs as another user", field="relay")
        await channel.send(encode(self._describe()), tuple(self._descriptors))
        answer = decode_to_engine(await channel.receive())
        if isinstance(answer, Denied):
            raise ConfigError(f"the relay denies the attachment: {answer.reason}", field="relay")

    async def _keep(self) -> None:
        """Reads the relay's answers; attaches again when it was away."""
        while True:
            if self._channel is None:
                await asyncio.sleep(REATTACH_SECONDS)
                try:
                    await self._connect()
                except (RelayUnreachable, ConfigError) as error:
                    _log.debug("%s", error)
                    continue
            await self._read_answers()

    async def _read_answers(self) -> None:
        if self._channel is None:
            return
        try:
            while True:
                answer = decode_to_engine(await self._channel.receive())
                self._answers.put_nowait(answer if isinstance(answer, Denied) else None)
        except (ChannelClosed, msgspec.MsgspecError) as error:
            _log.warning("relay %s: %s", self.address, error)
            self._answers.put_nowait(None)  # nobody shall wait for an answer that cannot come
            self._disconnect()
            self._answers = asyncio.Queue()

    def _disconnect(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None


def _fill_failed(error: ClientError) -> FillFailed:
    """Says whether trying again could help: a source that does not fit never will."""
    kind = FillTimeout if error.code == "DEADLINE_EXCEEDED" else FillFailed
    final = "" if error.code in ("UNAVAILABLE", "NOT_FOUND", "CANCELLED") else "yes"
    return kind(error.message, **{**error.details, "final": final, "status": error.code})


def _report(last: relay_pb2.PullResponse) -> FillReport:
    report = convert.report_from_proto(last.report)
    report.probe = last.probe
    return report
