"""Engine error → gRPC status, in one table, with rich details."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine_service import errors

DOMAIN = "engine.seedrelay"
RETRY_SECONDS = 1
MESSAGE_BYTES, DETAIL_BYTES = 1000, 300
"""A status travels as metadata, percent-encoded and once more in base64; beyond 8 KiB in
all a client may see only that it was too large."""
_Code = grpc.StatusCode

TABLE: dict[type[errors.EngineError], grpc.StatusCode] = {
    errors.EngineError: _Code.INTERNAL,
    errors.ConfigError: _Code.INVALID_ARGUMENT,
    errors.InvalidRequest: _Code.INVALID_ARGUMENT,
    errors.NotReady: _Code.UNAVAILABLE,
    errors.WaitTimeout: _Code.DEADLINE_EXCEEDED,
    errors.QueueFull: _Code.RESOURCE_EXHAUSTED,
    errors.RequestExists: _Code.ALREADY_EXISTS,
    errors.NotOffered: _Code.UNIMPLEMENTED,
    errors.WrongState: _Code.FAILED_PRECONDITION,
    errors.UpdateBusy: _Code.UNAVAILABLE,
    errors.UpdateEnded: _Code.FAILED_PRECONDITION,
    errors.ModelError: _Code.FAILED_PRECONDITION,
    errors.CheckpointError: _Code.INVALID_ARGUMENT,
    errors.ArenaError: _Code.INTERNAL,
    errors.CaptureError: _Code.INTERNAL,
    errors.ProbeMismatch: _Code.DATA_LOSS,
    errors.FillFailed: _Code.UNAVAILABLE,
    errors.FillTimeout: _Code.DEADLINE_EXCEEDED,
    errors.RelayUnreachable: _Code.UNAVAILABLE,
    errors.RankDied: _Code.UNAVAILABLE,
    errors.RecoveryFailed: _Code.UNAVAILABLE,
    errors.ResourceExhausted: _Code.RESOURCE_EXHAUSTED,
}
"""Subclasses follow their nearest base."""

_RETRYABLE = (errors.NotReady, errors.QueueFull, errors.UpdateBusy)


def code_of(error: errors.EngineError) -> grpc.StatusCode:
    """Returns the status of an error or of its nearest base.

    A fill that failed on the relay's side answers with the relay's own status.
    """
    if isinstance(error, errors.FillFailed) and error.details.get("status") in _Code.__members__:
        return _Code[error.details["status"]]
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


async def abort_with(context: grpc.aio.ServicerContext, error: errors.EngineError) -> NoReturn:
    """Ends a call with the error's status; `ErrorInfo` carries its class and details."""
    details = [
        error_details_pb2.ErrorInfo(
            reason=type(error).__name__, domain=DOMAIN, metadata=_clip_all(error.details)
        )
    ]
    if isinstance(error, _RETRYABLE):
        delay = duration_pb2.Duration(seconds=RETRY_SECONDS)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for wrapper, detail in zip(packed, details, strict=True):
        wrapper.Pack(detail)
    status = rpc_status.to_status(
        status_pb2.Status(
            code=code_of(error).value[0],
            message=_clip(error.message, MESSAGE_BYTES),
            details=packed,
        )
    )
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError  # abort has raised


def _clip(text: str, most: int) -> str:
    """Returns text of at most so many bytes of UTF-8; a cut one ends in an ellipsis."""
    data = text.encode()
    return text if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def _clip_all(details: dict[str, str]) -> dict[str, str]:
    return {name: _clip(value, DETAIL_BYTES) for name, value in details.items()}


def answers(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wraps a unary handler: its errors become statuses."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except errors.EngineError as error:
            await abort_with(context, error)

    return handler


def streams(
    method: Callable[..., AsyncIterator[Any]],
) -> Callable[..., AsyncIterator[Any]]:
    """Wraps a streaming handler: its errors become statuses."""

    @functools.wraps(method)
    async def handler(
        self: Any, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        try:
            async for response in method(self, request, context):
                yield response
        except errors.EngineError as error:
            await abort_with(context, error)

    return handler
