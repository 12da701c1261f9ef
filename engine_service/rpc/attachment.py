"""Keeps an engine attached to the relay of its host, over the relay's Unix socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from clients.relay import RelayClient
from engine_service.errors import ConfigError, FillFailed, RelayUnreachable
from engine_service.rpc.relay_socket import ANSWER_SECONDS, introduced
from relay_service.core.attachment import (
    Attach,
    Closing,
    Denied,
    Lend,
    Reading,
    ToEngine,
    ToRelay,
    Update,
    decode_to_engine,
    encode,
)
from relay_service.core.channel import AsyncChannel, ChannelClosed

REATTACH_SECONDS = 0.5
_log = logging.getLogger(__name__)


class Attachment:
    """One attachment that is made anew whenever the relay was away."""

    def __init__(self, relay: RelayClient) -> None:
        self._relay = relay
        self._channel: AsyncChannel | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[ToEngine | None] = asyncio.Queue()
        """None when the relay was lost."""
        self._owed = 0
        self._files_told: dict[str, bytes] = {}
        self._telling = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._relay_pid = 0

    @property
    def relay_died(self) -> bool:
        """Whether the relay process that was attached to last is no more."""
        return bool(self._relay_pid) and not Path(f"/proc/{self._relay_pid}").exists()

    async def attach(
        self, describe: Callable[[], Attach], descriptors: Callable[[], list[int]]
    ) -> None:
        """Attaches and keeps attached. Raises `RelayUnreachable` or `ConfigError`."""
        self._describe, self._descriptors = describe, descriptors
        try:
            await self._connect()
        finally:
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())

    def describe(self) -> Attach:
        """Describes the instance as it is now."""
        return self._describe()

    async def update(self) -> None:
        """Tells the relay how the instance changed."""
        async with self._telling:
            if self._channel is None:
                return
            now = self._describe()
            message = Update(
                model=now.model,
                state=now.state,
                placement=now.placement,
                weights=now.weights,
                manifests=now.manifests,
                probe=now.probe,
                # Megabytes, which seldom change.
                artifacts=None if now.artifacts == self._files_told else now.artifacts,
            )
            answer = await self._say(self._channel, message)
            if isinstance(answer, Denied):
                _log.error("the relay denied an update: %s", answer.reason)
            elif answer:  # else it hears of it when it is attached again
                self._files_told = dict(now.artifacts)

    async def closing(self, version: str, *, ends_leases: bool) -> tuple[str, ...]:
        """Says that other weights come; returns who reads. Nobody, where the relay is away."""
        async with self._telling:
            message, answer = Closing(version, ends_leases), None
            if self._channel:
                answer = await self._say(self._channel, message)
        return answer.holders if isinstance(answer, Reading) else ()

    async def lend(self, descriptors: list[list[int]]) -> None:
        """Lends memory of each rank for one pull; the descriptors stay the caller's.

        Raises `RelayUnreachable`, `ConfigError`, and `FillFailed` when the relay denies it.
        """
        if self._keeper:  # the relay may be back before it was attached to again
            await self._connect()
        answer, message = None, Lend(len(descriptors[0]))
        async with self._telling:
            if self._channel:
                passed = [fd for rank in descriptors for fd in rank]
                answer = await self._say(self._channel, message, passed)
        if answer is None:
            raise RelayUnreachable(f"not attached to relay {self._relay.address}")
        if isinstance(answer, Denied):
            raise FillFailed(f"the relay takes no memory for new weights: {answer.reason}")

    def detach(self) -> None:
        """Drops the connection; `_keep` attaches again."""
        if self._channel:
            self._channel.close()
            self._channel = None

    async def close(self) -> None:
        """Detaches for good."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        self.detach()

    async def _say(
        self, channel: AsyncChannel, message: ToRelay, descriptors: Sequence[int] = ()
    ) -> ToEngine | None:
        """Returns the relay's answer; none when it is lost, or says nothing in time."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await channel.send(encode(message), tuple(descriptors))
                self._owed += 1
                return await self._own_answer()
        except ChannelClosed:
            return None
        except TimeoutError:
            _log.warning("relay %s does not answer", self._relay.address)
            self.detach()
            return None

    async def _own_answer(self) -> ToEngine | None:
        """Waits for the answer to what was said last; whoever was cancelled left theirs behind."""
        while answer := await self._answers.get():
            self._owed -= 1
            if not self._owed:
                break
        return answer

    async def _connect(self) -> None:
        async with self._connecting:  # a fill and the keeper may both want to
            if self._channel is None:
                self._channel = await self._connected()
                _log.info("attached to relay %s", self._relay.address)

    async def _connected(self) -> AsyncChannel:
        async with introduced(self._relay) as channel:
            await self._introduce(channel)
        return channel

    async def _introduce(self, channel: AsyncChannel) -> None:
        self._relay_pid = channel.peer_credentials()[0]
        now = self._describe()
        await channel.send(encode(now), tuple(self._descriptors()))
        answer = decode_to_engine(await channel.receive())
        if isinstance(answer, Denied):
            raise ConfigError(f"the relay denies the attachment: {answer.reason}", field="relay")
        self._files_told = dict(now.artifacts)

    async def _keep(self) -> None:
        """Reads the relay's answers; attaches again when it was away."""
        while True:
            if self._channel is None:
                await asyncio.sleep(REATTACH_SECONDS)
                try:
                    await self._connect()
                except (RelayUnreachable, ConfigError) as error:
                    _log.debug("%s", error)
            else:
                await self._read_answers(self._channel)

    async def _read_answers(self, channel: AsyncChannel) -> None:
        try:
            while True:
                self._answers.put_nowait(decode_to_engine(await channel.receive()))
        except (ChannelClosed, msgspec.MsgspecError) as error:
            if self._channel is channel:  # else it was left on purpose
                _log.warning("relay %s: %s", self._relay.address, error)
            self._answers.put_nowait(None)  # nobody shall wait for an answer that cannot come
            self._answers, self._owed = asyncio.Queue(), 0
            if self._channel is channel:
                self.detach()
