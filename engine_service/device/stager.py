"""The thread of a rank that stages weights while others of its threads serve.

It answers a stream of its own, and gives way to whoever serves: it has a low priority and
computes with one thread. An error here never ends a rank.
"""

from __future__ import annotations

import logging
import os
import threading

import torch

from engine_service.core import messages
from engine_service.core.update_messages import Lent, StagingCommand
from engine_service.device.rank import Rank
from engine_service.device.replies import Replies
from engine_service.errors import EngineError, WrongState
from relay_service.core.channel import BlockingChannel, ChannelClosed
from relay_service.errors import RelayError

_log = logging.getLogger(__name__)
_NICE = 10
"""Low, and not lowest: what waits for a lock that this thread holds must not wait for ever."""


class Stager:
    """Answers commands that stage weights, in their order."""

    def __init__(self, channel: BlockingChannel, rank: Rank) -> None:
        """Takes the channel over."""
        self._channel, self._rank = channel, rank
        self._replies = Replies(channel)
        self._thread = threading.Thread(target=self._serve, name="stager", daemon=True)

    def start(self) -> None:
        """Starts the thread. It ends with the stream, or with the process."""
        # Whoever has asked for its number of threads keeps it when another thread sets its own.
        torch.get_num_threads()
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()

    def _serve(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        torch.set_num_threads(1)
        if self._rank.device.torch.type == "cuda":
            torch.cuda.set_device(self._rank.device.torch)  # each thread has one of its own
        try:
            while True:
                self._answer(messages.decode_staging(self._channel.receive()))
        except ChannelClosed:
            return
        finally:
            self._channel.close()

    def _answer(self, command: StagingCommand) -> None:
        staging = self._rank.staging
        try:
            reply = staging.answer(command, self._progress)
            descriptors = staging.descriptors if isinstance(reply, Lent) else ()
            self._replies.send(reply, descriptors)
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the update, not the rank
            if not isinstance(error, EngineError | RelayError):
                _log.exception("%s failed", type(command).__name__)
            self._replies.fail(error, **({"changed": "yes"} if staging.changed else {}))

    def _progress(self, done: int, total: int) -> None:
        """Tells how far it is. Another command meanwhile means that nobody waits for this one."""
        if self._channel.waiting:
            raise WrongState("staging was given up")
        self._replies.progress(done, total)
