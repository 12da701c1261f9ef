"""Relay error → gRPC status, in one table, with rich details."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from relay_service import errors

DOMAIN = "relay.seedrelay"
MESSAGE_BYTES, DETAIL_BYTES = 1000, 300
"""A status travels as metadata, percent-encoded and once more in base64; beyond 8 KiB in
all a client may see only that it was too large."""
_Code = grpc.StatusCode

TABLE: dict[type[errors.RelayError], grpc.StatusCode] = {
    errors.RelayError: _Code.INTERNAL,
    errors.ConfigError: _Code.INVALID_ARGUMENT,
    errors.InvalidRequest: _Code.INVALID_ARGUMENT,
    errors.NotFound: _Code.NOT_FOUND,
    errors.Conflict: _Code.ALREADY_EXISTS,
    errors.Refused: _Code.FAILED_PRECONDITION,
    errors.SourceFailed: _Code.UNAVAILABLE,
    errors.NotYet: _Code.UNAVAILABLE,
    errors.SourceBusy: _Code.UNAVAILABLE,
    errors.NoSource: _Code.UNAVAILABLE,
    errors.CorruptBlock: _Code.DATA_LOSS,
    errors.ResourceExhausted: _Code.RESOURCE_EXHAUSTED,
    errors.DeviceError: _Code.INTERNAL,
    errors.PullTimeout: _Code.DEADLINE_EXCEEDED,
    errors.PullEnded: _Code.CANCELLED,
}
"""Subclasses follow their nearest base."""


def code_of(error: errors.RelayError) -> grpc.StatusCode:
    """Returns the status of an error or of its nearest base."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


async def abort_with(context: grpc.aio.ServicerContext, error: errors.RelayError) -> NoReturn:
    """Ends a call with the error's status; `ErrorInfo` carries its class and details."""
    packed = any_pb2.Any()
    packed.Pack(
        error_details_pb2.ErrorInfo(
            reason=type(error).__name__, domain=DOMAIN, metadata=_clip_all(error.details)
        )
    )
    status = rpc_status.to_status(
        status_pb2.Status(
            code=code_of(error).value[0],
            message=_clip(error.message, MESSAGE_BYTES),
            details=[packed],
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
        except errors.RelayError as error:
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
        except errors.RelayError as error:
            await abort_with(context, error)

    return handler
