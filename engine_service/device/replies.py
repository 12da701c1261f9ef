"""What a rank sends on one stream. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine_service import errors
from engine_service.core import messages
from engine_service.errors import EngineError
from relay_service.core.channel import BlockingChannel
from relay_service.errors import RelayError

_PROGRESS_BYTES = 16 << 20
_PROGRESS_SECONDS = 0.5


class Replies:
    """Answers, failures, and how far a long command is: not too often."""

    def __init__(
        self, channel: BlockingChannel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._clock = channel, clock
        self._reported_bytes, self._reported_at = 0, clock()

    def send(self, reply: messages.Reply, descriptors: tuple[int, ...] = ()) -> None:
        """Answers. Raises `ChannelClosed`."""
        self._channel.send(messages.encode(reply), descriptors)

    def fail(self, error: Exception, **details: str) -> None:
        """Answers with what went wrong, and with details beside its own."""
        kind, message = "EngineError", f"{type(error).__name__}: {error}"
        if isinstance(error, EngineError | RelayError):
            kind, message = kind_of(error), error.message
            details = error.details | details
        self.send(messages.Failed(kind, message, details))

    def progress(self, done: int, total: int) -> None:
        """Tells how far a command is, now and then and at its end."""
        now, far = self._clock(), not 0 <= done - self._reported_bytes < _PROGRESS_BYTES
        if done == total or far or now >= self._reported_at + _PROGRESS_SECONDS:
            self._reported_bytes, self._reported_at = done, now
            self.send(messages.Progress(done, total))


def kind_of(error: EngineError | RelayError) -> str:
    """The relay's memory and layout have errors of their own; some share our names."""
    name = type(error).__name__
    return name if hasattr(errors, name) else "EngineError"
