"""The process of one rank: `python -m engine_service.device.worker FD [RENDEZVOUS_FD]`.

Reads commands from the inherited socket and answers each in turn, until the front
closes it. The front owns shutdown: signals meant for it don't stop a rank.

A thread imports torch, which takes more than a second. The first command is answered
meanwhile: the arena is allocated, and weights may land, before the model is built on it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine_service import errors
from engine_service.core import messages
from engine_service.core.check_messages import DigestWeights
from engine_service.core.expert_messages import DropExperts, MoveExperts, StageExperts
from engine_service.device.plan import Plan, plan
from engine_service.errors import CollectiveFailed, EngineError, WrongState
from relay_service.core.channel import BlockingChannel, ChannelClosed
from relay_service.errors import RelayError

if TYPE_CHECKING:
    from engine_service.device.rank import Rank

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROGRESS_BYTES = 16 << 20
_PROGRESS_SECONDS = 0.5


class Worker:
    """Answers the commands of one front."""

    def __init__(
        self, channel: BlockingChannel, rendezvous_fd: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`rendezvous_fd` is the memory file in which the ranks of an instance meet."""
        self._channel = channel
        self._rendezvous_fd = rendezvous_fd
        self._rank: Rank | None = None
        self._clock = clock
        self._reported_bytes, self._reported_at = 0, clock()
        self._planned: tuple[messages.Start, Plan] | None = None
        self._imported_at = self._built_at = 0.0
        self._importing = threading.Thread(target=self._import, daemon=True)
        self._importing.start()

    def serve(self) -> None:
        """Answers commands until the front has gone, which raises `ChannelClosed`.

        An error that nobody expected during a step, or while experts are put into place, is
        answered and raised too: what it left behind is unknown, so the rank ends. So it does
        after a collective that failed: the ranks would never be in step again.
        """
        while True:
            command = messages.decode_command(self._channel.receive())
            try:
                self._answer(command)
            except (EngineError, RelayError) as error:
                self._fail(_kind(error), error.message, error.details)
                if isinstance(error, CollectiveFailed):
                    raise
            except ChannelClosed:
                raise
            except Exception as error:
                _log.exception("%s failed", type(command).__name__)
                self._fail("EngineError", f"{type(error).__name__}: {error}", {})
                if isinstance(command, messages.Step | MoveExperts):
                    raise

    def _answer(self, command: messages.Command) -> None:
        reply = self._start(command) if isinstance(command, messages.Start) else self._run(command)
        descriptors: tuple[int, ...] = ()
        if isinstance(reply, messages.Allocated) and self._planned and self._planned[1].memory:
            descriptors = (self._planned[1].memory.fd,)
        elif isinstance(reply, messages.Allocated | messages.Moved) and self._rank:
            descriptors = self._rank.arena.descriptors
        self._channel.send(messages.encode(reply), descriptors)

    def _start(self, command: messages.Start) -> messages.Reply:
        if self._planned is not None:
            raise WrongState("the rank has been started already")
        planned = plan(command)
        self._planned = command, planned
        memory = planned.memory
        if command.config.world_size > 1 or memory is None:
            # The ranks meet: one that hangs is missed here, in time. A device needs torch.
            rank = self._built(command)
            return rank.allocated()
        return messages.Allocated(
            manifest=planned.manifest,
            facts=planned.facts,
            max_positions=planned.config.max_positions,
            address=memory.mapping.address,
            page_kind=memory.mapping.page_kind(),
            descriptors=1,
            experts=planned.shard.experts.map if planned.shard.experts else None,
        )

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
            self._built_at = time.monotonic()
        return self._rank

    def _import(self) -> None:
        """Imports what a rank is made of, without looking for garbage among it."""
        gc.disable()
        try:
            importlib.import_module("engine_service.device.rank")
        finally:
            gc.freeze()  # modules stay: no later collection need look at them either
            gc.enable()
            self._imported_at = time.monotonic()

    def _run(self, command: messages.Command) -> messages.Reply:
        rank = self._built(command)
        reply: messages.Reply = messages.Done()
        match command:
            case messages.Step():
                reply = rank.step(command.rows)
            case messages.LoadDisk():
                reply = rank.load(
                    Path(command.folder), self._progress,
                    narrow=command.narrow, bytes_per_second=command.bytes_per_second,
                )  # fmt: skip
            case messages.RecordProbe():
                reply = rank.record_probe()
            case StageExperts() | MoveExperts() | DropExperts():
                reply = rank.experts.answer(command)
            case DigestWeights():
                reply = rank.checker.answer(command)
            case messages.Capture():
                rank.capture()
                times = self._imported_at, self._built_at
                reply = messages.Captured(*times, rank.graphs.compiled)
            case messages.CutOff():
                reply = messages.Moved(rank.arena.replace_backing())
            case messages.Commit():
                rank.arena.seal()
            case messages.CheckProbe():
                rank.check_probe(command.probe)
        return reply

    def _progress(self, done: int, total: int) -> None:
        now, far = self._clock(), not 0 <= done - self._reported_bytes < _PROGRESS_BYTES
        if done == total or far or now >= self._reported_at + _PROGRESS_SECONDS:
            self._reported_bytes, self._reported_at = done, now
            self._channel.send(messages.encode(messages.Progress(done, total)))

    def _fail(self, kind: str, message: str, details: dict[str, str]) -> None:
        self._channel.send(messages.encode(messages.Failed(kind, message, details)))


def _kind(error: EngineError | RelayError) -> str:
    """The relay's memory and layout have errors of their own; some share our names."""
    name = type(error).__name__
    return name if hasattr(errors, name) else "EngineError"


def main() -> None:
    """Serves the front at the other end of the socket that `argv` names.

    Several ranks also inherit the memory file in which they meet.
    """
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # A front that died before the line above is noticed here: nobody holds its end.
    channel = BlockingChannel(socket.socket(fileno=int(sys.argv[1])))
    rendezvous_fd = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    try:
        Worker(channel, rendezvous_fd).serve()
    except ChannelClosed:
        _leave(0, "the front has gone")
    except CollectiveFailed as error:
        _leave(1, str(error))


def _leave(status: int, reason: str) -> None:
    """Ends at once: taking torch down takes a second, and a front waits for every rank."""
    _log.log(logging.ERROR if status else logging.INFO, "%s", reason)
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
