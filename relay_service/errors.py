"""Errors of the relay service.

RelayError
├── ConfigError            a setting that cannot work
├── InvalidRequest         a request that can never be served
│   └── ManifestError      a manifest that contradicts itself
├── NotFound               an instance, rank, lease or artifact that isn't here
├── Conflict               a name that another instance holds
├── Refused                a source or target that does not fit
│   ├── FormatMismatch     other format, placement or layout
│   ├── Ambiguous          several models fit and none is named
│   ├── WrongState         the instance is not in a state for this
│   ├── LeaseEnded         the lease is over
│   ├── ReadsFromReader    the reader is itself what this source is filled from
│   └── EpochChanged       the source was updated while it was read
├── SourceFailed           a source died, stalled or broke the protocol
├── NotYet                 a block that an incomplete source has not verified yet
├── SourceBusy             a source that feeds as many readers as it can at full speed
├── NoSource               nobody (or nobody any more) can fill the target
│   └── PartsMissing       rows and columns that no source holds
├── CorruptBlock           bytes that do not match their digest
├── ResourceExhausted      no memory, no descriptors, too many readers
├── DeviceError            a device that isn't there, or a call of its driver that failed
├── PullTimeout            the deadline of a pull is over
└── PullEnded              somebody ended the pull, or its target has left
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

_SHOWN = 4


class RelayError(Exception):
    """Base of all errors of the relay.

    `details` carries what a caller needs to act: field, expected, found, hint.
    """

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ConfigError(RelayError):
    """A setting that cannot work."""


class InvalidRequest(RelayError):
    """A request that can never be served."""


class ManifestError(InvalidRequest):
    """A manifest that contradicts itself."""


class NotFound(RelayError):
    """An instance, rank, lease or artifact that isn't here."""


class Conflict(RelayError):
    """A name that another instance holds."""


class Refused(RelayError):
    """A source or target that does not fit."""


class FormatMismatch(Refused):
    """Other format, placement or layout; the message names the first difference."""


class Ambiguous(Refused):
    """Several models fit and none is named."""


class WrongState(Refused):
    """The instance is not in a state for this."""


class LeaseEnded(Refused):
    """The lease is over."""


class EpochChanged(Refused):
    """The source was updated while it was read."""


class ReadsFromReader(Refused):
    """The reader is itself, directly or not, what this source is filled from."""


class SourceFailed(RelayError):
    """A source died, stalled or broke the protocol."""


class NotYet(RelayError):
    """A block, or the weights at all, that an incomplete source has not verified yet."""


class SourceBusy(RelayError):
    """A source that feeds as many readers as it can; `next` names whom to read from instead."""

    upstream: Sequence[str] = ()
    """Through whom `next` gets its blocks, the nearest first; empty where nobody knows."""
    probe: bytes = b""

    def knowing(self, upstream: Sequence[str], probe: bytes) -> Self:
        """Adds what a status has no room for."""
        self.upstream, self.probe = tuple(upstream), probe
        return self


class NoSource(RelayError):
    """Nobody, or nobody any more, can fill the target."""


class PartsMissing(NoSource):
    """Rows and columns that no source holds. `missing` names all, the message the first few."""

    def __init__(self, missing: Sequence[str]) -> None:
        shown = [*missing[:_SHOWN], *([f"{len(missing)} in all"] if missing[_SHOWN:] else [])]
        super().__init__(
            f"no source holds {'; '.join(shown)}",
            missing=missing[0], hint="add sources that hold them",
        )  # fmt: skip
        self.missing = tuple(missing)


class CorruptBlock(RelayError):
    """Bytes that do not match their digest; names rank, tensor and block."""

    def __init__(self, rank: int, tensor: str, block: int, *others: int) -> None:
        """`others` are blocks that came with it and are as wrong."""
        self.blocks = (block, *others)
        super().__init__(
            f"rank {rank}, tensor {tensor}, block {block}: bytes do not match their digest",
            rank=str(rank),
            tensor=tensor,
            block=str(block),
        )


class ResourceExhausted(RelayError):
    """No memory, no descriptors or too many readers."""


class DeviceError(RelayError):
    """A device that isn't there, or a call of its driver that failed; names call and error."""


class PullTimeout(RelayError):
    """The deadline of a pull is over."""


class PullEnded(RelayError):
    """Somebody ended the pull, or its target has left."""
