"""Errors of the engine service.

EngineError
├── ConfigError            a setting that cannot work
├── InvalidRequest         a request that can never be served
├── NotReady               the instance isn't ready (yet, or any more)
├── WaitTimeout            what was waited for did not come in time
├── QueueFull              too many requests wait
├── RequestExists          a request of that name is being served
├── NotOffered             an operation that this service does not have
├── WrongState             the instance is not in a state for this
├── UpdateBusy             somebody else changes the weights
├── UpdateEnded            the session of an update has ended
├── ModelError             a model folder that cannot be served
│   ├── CheckpointError    a checkpoint that is broken or does not fit
│   └── UnsupportedModel   a family, format or dtype that isn't supported
├── ArenaError             weights that lie outside the arena, or cannot be sealed
├── CaptureError           a graph that could not be captured
├── NonFiniteLogits        the weights compute NaN or infinity
├── ProbeMismatch          the weights do not compute what the seed recorded
├── FillFailed             no source could fill the instance
│   └── FillTimeout        the deadline is over
├── RelayUnreachable       the relay cannot be reached
├── RankDied               a rank worker ended or broke the protocol
│   ├── CollectiveFailed   another rank has gone, or did not come in time
│   └── RanksLost          ranks have gone, and others live
├── RecoveryFailed         what lost ranks held could not be brought back
└── ResourceExhausted      no memory or no descriptors
"""

from __future__ import annotations

from typing import Self

from relay_service.errors import RelayError


class EngineError(Exception):
    """Base of all errors of the engine.

    `details` carries what a caller needs to act: field, expected, found, hint.
    """

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ConfigError(EngineError):
    """A setting that cannot work."""

    @classmethod
    def of(cls, error: RelayError) -> Self:
        """Takes over what the relay's code, which we share, found wrong."""
        return cls(error.message, **error.details)


class InvalidRequest(EngineError):
    """A request that can never be served."""


class NotReady(EngineError):
    """The instance isn't ready, yet or any more."""


class WaitTimeout(EngineError):
    """What was waited for did not come in time."""


class QueueFull(EngineError):
    """Too many requests wait."""


class RequestExists(EngineError):
    """A request of that name is being served already."""


class NotOffered(EngineError):
    """An operation that this service does not have."""


class WrongState(EngineError):
    """The instance is not in a state for this."""


class UpdateBusy(EngineError):
    """Somebody else changes the weights. `details` say who, and for how long."""


class UpdateEnded(EngineError):
    """The session of an update has ended: aborted, failed, or its lease is over."""


class ModelError(EngineError):
    """A model folder that cannot be served."""


class CheckpointError(ModelError):
    """A checkpoint that is broken or does not fit the model."""


class UnsupportedModel(ModelError):
    """A family, format or dtype that isn't supported."""


class ArenaError(EngineError):
    """Weights that lie outside the arena, or an arena that cannot be sealed."""


class CaptureError(EngineError):
    """A graph that could not be captured."""


class NonFiniteLogits(EngineError):
    """The weights compute NaN or infinity where a token should come from."""


class ProbeMismatch(EngineError):
    """The weights do not compute what the seed recorded."""


class FillFailed(EngineError):
    """No source could fill the instance."""


class FillTimeout(FillFailed):
    """The deadline of a fill is over."""


class RelayUnreachable(EngineError):
    """The relay cannot be reached."""


class RankDied(EngineError):
    """A rank worker ended or broke the protocol."""


class CollectiveFailed(RankDied):
    """Another rank has gone, or did not come to a collective operation in time."""


class RanksLost(RankDied):
    """Ranks have gone, and others live that could go on without them."""


class RecoveryFailed(EngineError):
    """What lost ranks held could not be brought back; it may be at the next try."""


class ResourceExhausted(EngineError):
    """No memory or no descriptors."""
