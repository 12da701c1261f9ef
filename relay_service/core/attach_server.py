"""Unix socket on which the engines of this host attach. Plain Python.

One connection is one life of an instance: its end, however it comes, detaches. Another kind
of connection asks for the arena of a life that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from pathlib import Path

import msgspec

from relay_service.core.attachment import (
    Accepted,
    Attach,
    Closing,
    Denied,
    Lend,
    Reading,
    ToEngine,
    Update,
    decode_to_relay,
    encode,
)
from relay_service.core.channel import AsyncChannel, ChannelClosed
from relay_service.core.hand_back import hand_back
from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.ports import MapArena
from relay_service.core.reclaiming import Reclaim
from relay_service.core.transfers import Transfers
from relay_service.errors import ConfigError, InvalidRequest, RelayError

RETRY_SECONDS = 0.1
Life = tuple[int, str, str]
"""Process of the engine, name and generation of the instance."""
_log = logging.getLogger(__name__)


class AttachServer:
    """Accepts attachments and keeps the holdings true to them."""

    def __init__(
        self, path: Path, holdings: Holdings, transfers: Transfers, map_arena: MapArena
    ) -> None:
        self.path = path
        self._holdings = holdings
        self._transfers = transfers
        self._map_arena = map_arena
        self._connections: set[asyncio.Task[None]] = set()
        self._lives: dict[Life, tuple[AsyncChannel, asyncio.Task[None] | None]] = {}
        """Where each attached life of an instance speaks, and who serves it."""
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens; only this user can connect.

        A socket file that a killed relay of the same address left is replaced.
        Raises `ConfigError` when the folder is not this user's alone.
        """
        with contextlib.suppress(FileExistsError):
            self.path.parent.mkdir(mode=0o700, parents=True)
        _check_folder(self.path.parent)
        self.path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stops listening and detaches everyone."""
        tasks = [t for t in (self._accepting, *self._connections) if t]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._socket.close()
        self.path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors, for example: others leave in time
                _log.error("cannot accept an attachment: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            task = asyncio.create_task(self._serve(AsyncChannel(sock)))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, channel: AsyncChannel) -> None:
        holding: Holding | None = None
        try:
            _check_user(channel)
            attach = await _first_message(channel)
            if isinstance(attach, Reclaim):
                await hand_back(channel, self._holdings, attach)
                return
            life = channel.peer_credentials()[0], attach.instance, attach.generation
            await self._end_former(life)
            holding = self._attach(channel, attach)
            self._lives[life] = channel, asyncio.current_task()
            self._transfers.announce_soon()
            await channel.send(encode(Accepted()))
            while True:
                await self._follow(channel, holding)
        except ChannelClosed as error:
            _log.info("attachment of %s ended: %s", holding.name if holding else "nobody", error)
        except (RelayError, msgspec.MsgspecError) as error:
            _log.warning("attachment denied: %s", error)
            with contextlib.suppress(ChannelClosed):
                await channel.send(encode(Denied(str(error))))
        finally:
            if holding:
                await self._transfers.end(holding)
                self._holdings.detach(holding)
                self._transfers.announce_soon()
                del self._lives[life]
            channel.close()

    async def _end_former(self, life: Life) -> None:
        """Ends the attachment that this very engine had before: it has given it up.

        We may not have read so yet. Nothing writes for the former one any more when this
        returns.
        """
        former, task = self._lives.get(life, (None, None))
        if former and task:
            former.close()
            await asyncio.wait([task])

    def _attach(self, channel: AsyncChannel, message: Attach) -> Holding:
        ranks, per_rank = len(message.manifests), message.descriptors_per_rank
        descriptors = _take_descriptors(channel, ranks, per_rank)
        holding = Holding(message, descriptors, self._map_arena)
        try:
            self._holdings.add(holding)
        except RelayError:
            holding.detached = True
            holding.close()
            raise
        _log.info("attached %s (%s)", holding.name, holding.state)
        return holding

    async def _follow(self, channel: AsyncChannel, holding: Holding) -> None:
        message = decode_to_relay(await channel.receive())
        answer: ToEngine = Accepted()
        if isinstance(message, Lend):
            ranks, per_rank = len(holding.manifests), message.descriptors_per_rank
            descriptors = _take_descriptors(channel, ranks, per_rank)
            try:
                holding.lend(descriptors)
            except RelayError as error:  # what serves, serves on
                _log.warning("%s cannot lend memory: %s", holding.name, error)
                answer = Denied(str(error))
        elif isinstance(message, Closing):
            is_news = not holding.changing_to
            answer = Reading(self._holdings.close_to_readers(holding, message))
            if is_news:
                self._transfers.announce_soon()
                _log.info(
                    "%s will change to %s: nobody begins to read", holding.name, message.version
                )
        elif isinstance(message, Update):
            holding.apply(message)
            if holding.lent_in_vain:
                await self._transfers.end(holding)
                holding.drop_lent()
            self._transfers.announce_soon()
            _log.info("%s is %s at %s", holding.name, message.state, message.weights.version or "-")
        else:
            raise InvalidRequest("an instance attaches once per connection")
        await channel.send(encode(answer))


async def _first_message(channel: AsyncChannel) -> Attach | Reclaim:
    message = decode_to_relay(await channel.receive())
    if not isinstance(message, Attach | Reclaim):
        raise InvalidRequest("the first message must attach")
    return message


def _take_descriptors(channel: AsyncChannel, ranks: int, per_rank: int) -> list[int]:
    try:
        return channel.take_descriptors(ranks * per_rank)
    except ChannelClosed as error:
        raise InvalidRequest(f"{ranks} ranks: {error}") from error


def _check_folder(folder: Path) -> None:
    """Whoever owns the folder can put another socket in the place of ours."""
    now = folder.lstat()
    if not stat.S_ISDIR(now.st_mode) or now.st_uid != os.getuid() or now.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder that only this user may enter",
            field="socket", expected="mode 700, own", found=stat.filemode(now.st_mode),
            hint="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )  # fmt: skip


def _check_user(channel: AsyncChannel) -> None:
    if channel.peer_credentials()[1] != os.getuid():
        raise ChannelClosed("another user may not attach")
