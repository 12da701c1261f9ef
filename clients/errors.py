"""What went wrong with a call, as one typed error per gRPC status.

ClientError
├── Unreachable         nobody answers at the address (UNAVAILABLE)
├── DeadlineExceeded    the deadline is over
└── CallFailed          the service refused or failed
"""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class ClientError(Exception):
    """A call that did not succeed.

    `code` is the gRPC status by name, `reason` the service's own error class,
    `details` what it said besides: field, expected, found, hint. `retry_seconds` is how
    long to wait before asking again, where the service said so.
    """

    exit_code = 1

    def __init__(
        self, message: str, code: str, reason: str = "", details: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.details = details or {}
        self.retry_seconds: float | None = None

    @staticmethod
    def of(error: grpc.aio.AioRpcError, address: str) -> ClientError:
        """Makes the typed error of a failed call to `address`."""
        info, retry = _rich_details(error)
        made = ClientError._typed(error, address, info.reason, dict(info.metadata))
        made.retry_seconds = retry
        return made

    @staticmethod
    def _typed(
        error: grpc.aio.AioRpcError, address: str, reason: str, details: dict[str, str]
    ) -> ClientError:
        code, message = error.code(), error.details() or error.code().name
        if code is grpc.StatusCode.UNAVAILABLE and not reason:
            return Unreachable(f"{address} cannot be reached: {message}", code.name)
        if code is grpc.StatusCode.UNIMPLEMENTED and not reason:
            message = f"{address} does not offer this: is it an engine, or a relay?"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message, code.name, reason, details)
        return CallFailed(message, code.name, reason, details)


class Unreachable(ClientError):
    """Nobody answers at the address."""

    exit_code = 3


class DeadlineExceeded(ClientError):
    """The deadline is over."""

    exit_code = 4


class CallFailed(ClientError):
    """The service refused or failed."""


def _rich_details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    """Returns what the service says of its error, and when to ask again, if it says so."""
    info, retry, seconds = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), None
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return info, None
    for packed in status.details if status else ():
        if packed.Is(info.DESCRIPTOR):
            packed.Unpack(info)
        elif packed.Unpack(retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return info, seconds
