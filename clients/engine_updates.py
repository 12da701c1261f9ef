"""The calls of an engine's client that update weights in place, and name their versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import xxhash

from clients.channel import MESSAGE_BYTES, streamed
from clients.errors import ClientError
from seedrelay.v1 import engine_pb2, engine_pb2_grpc

CONTROL_SECONDS = 10.0
OVERHEAD_BYTES = 1 << 10
"""What a message needs beside the bytes of a piece, generously."""
ELEMENT_BYTES = 16
"""Pieces are cut at multiples of this: whole elements of every type."""
PIECE_BYTES = (MESSAGE_BYTES - OVERHEAD_BYTES) // ELEMENT_BYTES * ELEMENT_BYTES


class Tensor(NamedTuple):
    """A tensor to push."""

    name: str
    """As in a checkpoint."""
    dtype: str
    """As safetensors calls it, such as `BF16`."""
    shape: Sequence[int]
    data: Any
    """A contiguous buffer of its elements in C order."""


class UpdateCalls:
    """What `EngineClient` can do to weights. Every method raises like those of the client."""

    address: str
    _stub: engine_pb2_grpc.EngineServiceStub

    async def begin_update(
        self, request: engine_pb2.BeginWeightUpdateRequest, timeout: float | None = None
    ) -> engine_pb2.BeginWeightUpdateResponse:
        """Begins a session; waits for others as long as the request says."""
        begun: engine_pb2.BeginWeightUpdateResponse = await self._answer(
            self._stub.BeginWeightUpdate(request, timeout=timeout)
        )
        return begun

    async def renew_update(self, session: str) -> None:
        """Prolongs the lease of a session."""
        request = engine_pb2.RenewWeightUpdateRequest(session=session)
        await self._answer(self._stub.RenewWeightUpdate(request, timeout=CONTROL_SECONDS))

    async def stage(
        self, session: str, timeout: float | None = None
    ) -> AsyncIterator[engine_pb2.StageWeightsResponse]:
        """Has the engine stage what it reads by itself; the last message says what is staged.

        Leaving the iterator aborts the session.
        """
        call = self._stub.StageWeights(
            engine_pb2.StageWeightsRequest(session=session), timeout=timeout
        )
        async with aclosing(self._stream(call)) as responses:
            async for response in responses:
                yield response

    async def push(
        self, session: str, tensors: Iterable[Tensor], timeout: float | None = None
    ) -> engine_pb2.StagedWeights:
        """Stages tensors of any size, each with a digest that the engine checks.

        Being cancelled aborts the session. Their buffers are read until it returns.
        """
        held = list(tensors)
        header = await asyncio.to_thread(_header, session, held)
        done = await self._answer(self._stub.PushWeights(_messages(header, held), timeout=timeout))
        staged: engine_pb2.StagedWeights = done.staged
        return staged

    async def commit_update(
        self, session: str, timeout: float | None = None
    ) -> engine_pb2.UpdateReport:
        """Makes what is staged serve; an engine goes on after `timeout`. May be repeated."""
        request = engine_pb2.CommitWeightUpdateRequest(session=session)
        done = await self._answer(self._stub.CommitWeightUpdate(request, timeout=timeout))
        report: engine_pb2.UpdateReport = done.report
        return report

    async def abort_update(self, session: str) -> bool:
        """Ends a session; returns whether there was something to end."""
        request = engine_pb2.AbortWeightUpdateRequest(session=session)
        done = await self._answer(self._stub.AbortWeightUpdate(request, timeout=CONTROL_SECONDS))
        return bool(done.aborted)

    async def update(
        self, request: engine_pb2.UpdateWeightsRequest, timeout: float | None = None
    ) -> AsyncIterator[engine_pb2.UpdateWeightsResponse]:
        """Does a whole update; the last message carries the report.

        Leaving the iterator aborts it, unless it is being applied by then.
        """
        call = self._stub.UpdateWeights(request, timeout=timeout)
        async with aclosing(self._stream(call)) as responses:
            async for response in responses:
                yield response

    async def versions(self) -> list[engine_pb2.WeightVersionRecord]:
        """Lists weights that served, and updates that failed, the oldest first."""
        request = engine_pb2.ListWeightVersionsRequest()
        done = await self._answer(self._stub.ListWeightVersions(request, timeout=CONTROL_SECONDS))
        return list(done.versions)

    async def set_version(self, version: str, base_digest: str = "") -> str:
        """Calls the weights that serve otherwise; returns what they were called."""
        request = engine_pb2.SetWeightVersionRequest(
            weight_version=version, base_digest=base_digest
        )
        done = await self._answer(self._stub.SetWeightVersion(request, timeout=CONTROL_SECONDS))
        return str(done.former_weight_version)

    async def _answer(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise ClientError.of(error, self.address) from error

    def _stream(self, call: Any) -> AsyncGenerator[Any]:
        return streamed(call, self.address)


def _header(session: str, tensors: Sequence[Tensor]) -> engine_pb2.PushHeader:
    return engine_pb2.PushHeader(
        session=session,
        tensors=[
            engine_pb2.PushedTensor(
                name=one.name, dtype=one.dtype, shape=one.shape,
                digest=xxhash.xxh3_128_digest(_bytes(one)),
            )
            for one in tensors
        ],
    )  # fmt: skip


def _messages(
    header: engine_pb2.PushHeader, tensors: Sequence[Tensor]
) -> Iterator[engine_pb2.PushWeightsRequest]:
    yield engine_pb2.PushWeightsRequest(header=header)
    for number, tensor in enumerate(tensors):
        view = _bytes(tensor)
        for offset in range(0, len(view), PIECE_BYTES):
            data = bytes(view[offset : offset + PIECE_BYTES])
            piece = engine_pb2.TensorPiece(tensor=number, offset=offset, data=data)
            yield engine_pb2.PushWeightsRequest(piece=piece)


def _bytes(tensor: Tensor) -> memoryview:
    view = memoryview(tensor.data)
    return view.cast("B") if view.nbytes else memoryview(b"")
