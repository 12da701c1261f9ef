"""The process of one rank: `python -m engine_service.device.worker FD FD [RENDEZVOUS_FD]`.

Reads commands from the first inherited socket and answers each in turn, until the front
closes it. On the second one `stager` answers those that stage weights, at the same time.
The front owns shutdown: signals meant for it don't stop a rank.

A thread imports torch, which takes more than a second. The first command is answered
meanwhile: the arena is allocated, and weights may land, before the model is built on it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_service.core import messages
from engine_service.core.check_messages import DigestWeights
from engine_service.core.expert_messages import DropExperts, MoveExperts, StageExperts
from engine_service.core.member_messages import Beat, Place, ReadUnits, Rejoin, TakeUnits
from engine_service.core.step_messages import Step
from engine_service.core.update_messages import ApplyUpdate, Trimmed, TrimMemory
from engine_service.device.importing import import_rank
from engine_service.device.plan import Plan, plan
from engine_service.device.replies import Replies
from engine_service.device.restoring import restore
from engine_service.device.taking import take_units
from engine_service.errors import CollectiveFailed, EngineError, WrongState
from relay_service.core.channel import BlockingChannel, ChannelClosed
from relay_service.errors import RelayError

if TYPE_CHECKING:
    from engine_service.device.rank import Rank

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Worker:
    """Answers the commands of one front."""

    def __init__(
        self, channel: BlockingChannel, staging: BlockingChannel | None = None,
        rendezvous_fd: int = -1,
    ) -> None:  # fmt: skip
        """What weights are staged by comes on `staging`.

        `rendezvous_fd` is the memory file in which the ranks of an instance meet.
        """
        self._channel, self._staging = channel, staging
        self._replies = Replies(channel)
        self._rendezvous_fd = rendezvous_fd
        self._rank: Rank | None = None
        self._planned: tuple[messages.Start, Plan] | None = None
        self._imported_at = self._built_at = 0.0
        self._importing = threading.Thread(target=self._import, daemon=True)
        self._importing.start()

    def serve(self) -> None:
        """Answers commands until the front has gone, which raises `ChannelClosed`.

        An error that nobody expected during a step, or while experts or weights are put into
        place, is answered and raised too: the rank ends, as nobody knows what it left behind. So
        it does where weights were left half-changed, and after a collective that failed, since
        the ranks would never be in step again, unless it outlives its peers and meets others.
        """
        while True:
            command = messages.decode_command(self._channel.receive())
            try:
                self._answer(command)
            except (EngineError, RelayError) as error:
                ends = self._ends(command, error)
                self._replies.fail(error)
                if ends:
                    raise
            except ChannelClosed:
                raise
            except Exception as error:
                _log.exception("%s failed", type(command).__name__)
                self._replies.fail(error)
                if isinstance(command, Step | MoveExperts | ApplyUpdate | Place):
                    raise

    def _ends(self, command: messages.Command, error: Exception) -> bool:
        """Returns whether an error ends the rank; otherwise it leaves peers that failed."""
        if isinstance(error, CollectiveFailed):
            if self._rank is None or not self._rank.outlives_peers:
                return True
            self._rank.part()
        if isinstance(command, MoveExperts | ApplyUpdate):
            return self._rank is not None and not self._rank.arena.whole
        return isinstance(command, Place)

    def _answer(self, command: messages.Command) -> None:
        reply: messages.Reply
        match command:
            case messages.Start():
                reply = self._start(command)
            case messages.Restore() | TakeUnits() | ReadUnits():
                reply = self._with_memory(command)
            case Beat():
                if self._planned:
                    self._built(command)
                reply = messages.Done()
            case _:
                reply = self._run(command)
        descriptors: tuple[int, ...] = ()
        if isinstance(reply, messages.Allocated) and self._planned and self._planned[1].memory:
            descriptors = (self._planned[1].memory.fd,)
        elif isinstance(reply, messages.Allocated | messages.Moved) and self._rank:
            descriptors = self._rank.arena.descriptors
        self._replies.send(reply, descriptors)

    def _start(self, command: messages.Start) -> messages.Reply:
        if self._planned is not None:
            raise WrongState("the rank has been started already")
        planned = plan(command)
        self._planned = command, planned
        memory = planned.memory
        if memory is None or (command.config.world_size > 1 and not command.config.joins_later):
            # The ranks meet: one that hangs is missed here, in time. A device needs torch.
            rank = self._built(command)
            return rank.allocated()
        return planned.allocated(memory)

    def _with_memory(self, command: messages.Restore | TakeUnits | ReadUnits) -> messages.Reply:
        """Does what needs memory whose descriptor has come along."""
        (fd,) = self._channel.take_descriptors(1)
        try:
            if self._planned is None:
                raise WrongState(f"{type(command).__name__} before Start")
            planned, progress = self._planned[1], self._replies.progress
            if isinstance(command, messages.Restore):
                return restore(planned, fd, command.manifest, progress)
            if isinstance(command, ReadUnits):
                return self._built(command).read_units(fd, command, progress)
            arena = self._rank.arena if self._rank else None
            return take_units(planned, arena, fd, command, progress)
        finally:
            os.close(fd)

    def _built(self, command: messages.Command) -> Rank:
        """Builds the rank once, when torch is there."""
        if self._rank is None:
            if self._planned is None:
                raise WrongState(f"{type(command).__name__} before Start")
            self._importing.join()
            import torch

            from engine_service.device.rank import Rank

            start, planned = self._planned
            torch.set_num_threads(start.config.threads)
            self._rank = Rank(start, self._rendezvous_fd, planned)
            if self._staging:
                from engine_service.device.stager import Stager

                Stager(self._staging, self._rank).start()
            self._built_at = time.monotonic()
        return self._rank

    def _import(self) -> None:
        try:
            import_rank()
        finally:
            self._imported_at = time.monotonic()

    def _run(self, command: messages.Command) -> messages.Reply:
        rank = self._built(command)
        match command:
            case Step():
                return rank.step(command.rows)
            case messages.LoadDisk():
                return rank.load(
                    Path(command.folder), self._replies.progress,
                    narrow=command.narrow, bytes_per_second=command.bytes_per_second,
                )  # fmt: skip
            case StageExperts() | MoveExperts() | DropExperts():
                return rank.experts.answer(command)
            case DigestWeights():
                return rank.checker.answer(command)
            case ApplyUpdate():
                return rank.staging.apply()
        return self._attend(rank, command)

    def _attend(self, rank: Rank, command: messages.Command) -> messages.Reply:
        """Does what neither computes for requests nor changes weights."""
        reply: messages.Reply = messages.Done()
        match command:
            case Rejoin():
                rank.rejoin(command)
            case Place():
                reply = rank.experts.place(command)
            case messages.Capture():
                rank.capture()
                times = self._imported_at, self._built_at
                reply = messages.Captured(*times, rank.graphs.compiled)
            case messages.RecordProbe():
                reply = rank.record_probe()
            case messages.CheckProbe():
                rank.check_probe(command.probe, command.steps)
            case messages.CutOff():
                reply = messages.Moved(rank.arena.replace_backing())
            case messages.Commit():
                rank.arena.seal()
            case TrimMemory():
                reply = Trimmed(*rank.device.trim())
        return reply


def main() -> None:
    """Serves the front at the other end of the sockets that `argv` names.

    Several ranks also inherit the memory file in which they meet.
    """
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # A front that died before the line above is noticed here: nobody holds its end.
    channel, staging = (
        BlockingChannel(socket.socket(fileno=int(number))) for number in sys.argv[1:3]
    )
    rendezvous_fd = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    try:
        Worker(channel, staging, rendezvous_fd).serve()
    except ChannelClosed:
        _leave(0, "the front has gone")
    except Exception as error:  # noqa: BLE001 - whatever it was, it was answered and logged
        _leave(1, str(error))


def _leave(status: int, reason: str) -> None:
    """Ends at once: taking torch down takes a second, and a front waits for every rank."""
    _log.log(logging.ERROR if status else logging.INFO, "%s", reason)
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
