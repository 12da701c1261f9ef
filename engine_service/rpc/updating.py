"""The RPCs that update weights in place, and name their versions: check, one call, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import grpc

from engine_service.core.instance import Instance
from engine_service.core.relabel import relabel
from engine_service.core.update_messages import StagePiece
from engine_service.core.update_request import UpdateProgress
from engine_service.core.update_session import Session
from engine_service.core.update_sessions import UpdateSessions
from engine_service.errors import EngineError, InvalidRequest
from engine_service.rpc import convert_update as convert
from engine_service.rpc.convert import update_to_proto
from engine_service.rpc.following import following
from engine_service.rpc.status import answers, streams
from seedrelay.v1 import engine_pb2

HEAR_OUT_SECONDS = 0.5


class UpdatingRpcs:
    """Updates the weights of one instance."""

    _instance: Instance
    _updates: UpdateSessions

    @answers
    async def BeginWeightUpdate(  # noqa: N802
        self, request: engine_pb2.BeginWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.BeginWeightUpdateResponse:
        """Begins a session."""
        caller = convert.caller_from_proto(request, context.peer())
        session = await self._updates.begin(convert.update_from_proto(request.update), caller)
        return engine_pb2.BeginWeightUpdateResponse(
            session=session.name, lease=convert.seconds_to_proto(session.lease_seconds),
            base_digest=session.update.base_digest,
        )  # fmt: skip

    @answers
    async def RenewWeightUpdate(  # noqa: N802
        self, request: engine_pb2.RenewWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.RenewWeightUpdateResponse:
        """Prolongs the lease of a session."""
        del context
        session = self._updates.session(request.session)
        session.renew()
        lease = convert.seconds_to_proto(session.lease_seconds)
        return engine_pb2.RenewWeightUpdateResponse(lease=lease)

    @streams
    async def StageWeights(  # noqa: N802
        self, request: engine_pb2.StageWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.StageWeightsResponse]:
        """Stages what the engine reads by itself; leaving the call aborts the session."""
        del context
        session = self._updates.session(request.session)
        staging = asyncio.ensure_future(self._updates.stage(request.session))
        async with aclosing(following(staging, lambda: session.progress)) as steps:
            async for progress in steps:
                yield engine_pb2.StageWeightsResponse(progress=update_to_proto(progress))
        yield engine_pb2.StageWeightsResponse(
            progress=update_to_proto(session.progress),
            staged=convert.staged_to_proto(await staging),
        )

    @answers
    async def PushWeights(  # noqa: N802
        self,
        request: AsyncIterator[engine_pb2.PushWeightsRequest],
        context: grpc.aio.ServicerContext,
    ) -> engine_pb2.PushWeightsResponse:
        """Stages what the caller sends; leaving the call aborts the session."""
        del context
        first = await anext(request, None)
        if first is None or not first.HasField("header"):
            raise InvalidRequest("the first message carries no header", field="header")
        tensors = [convert.header_from_proto(one) for one in first.header.tensors]
        try:
            staged = await self._updates.push(first.header.session, tensors, _pieces(request))
        except EngineError:
            await _hear_out(request)
            raise
        return engine_pb2.PushWeightsResponse(staged=convert.staged_to_proto(staged))

    @answers
    async def CommitWeightUpdate(  # noqa: N802
        self, request: engine_pb2.CommitWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.CommitWeightUpdateResponse:
        """Applies what is staged."""
        del context
        report = await self._updates.session(request.session).commit()
        state = self._instance.lifecycle.state
        return engine_pb2.CommitWeightUpdateResponse(report=convert.report_to_proto(report, state))

    @answers
    async def AbortWeightUpdate(  # noqa: N802
        self, request: engine_pb2.AbortWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.AbortWeightUpdateResponse:
        """Ends a session."""
        aborted = await self._updates.abort(request.session, f"{context.peer()} has aborted it")
        return engine_pb2.AbortWeightUpdateResponse(aborted=aborted)

    @streams
    async def UpdateWeights(  # noqa: N802
        self, request: engine_pb2.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.UpdateWeightsResponse]:
        """Does a whole update; leaving the call aborts it, unless it is being applied."""
        caller = convert.caller_from_proto(request, context.peer())
        wanted = convert.update_from_proto(request.update)
        begun: list[Session] = []
        work = asyncio.ensure_future(self._updates.update(wanted, caller, begun.append))

        def progress() -> UpdateProgress:
            return begun[-1].progress if begun else self._updates.waiting

        async with aclosing(following(work, progress)) as steps:
            async for one in steps:
                yield engine_pb2.UpdateWeightsResponse(progress=update_to_proto(one))
        report = convert.report_to_proto(await work, self._instance.lifecycle.state)
        yield engine_pb2.UpdateWeightsResponse(progress=update_to_proto(progress()), report=report)

    @answers
    async def ListWeightVersions(  # noqa: N802
        self, request: engine_pb2.ListWeightVersionsRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.ListWeightVersionsResponse:
        """Lists weights that served, and updates that failed."""
        del request, context
        records = map(convert.record_to_proto, self._instance.history.records)
        return engine_pb2.ListWeightVersionsResponse(versions=records)

    @answers
    async def SetWeightVersion(  # noqa: N802
        self, request: engine_pb2.SetWeightVersionRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.SetWeightVersionResponse:
        """Calls the weights that serve otherwise."""
        version, base = convert.checked_version(request.weight_version), request.base_digest.lower()
        former = await relabel(self._instance, version, base, context.peer())
        return engine_pb2.SetWeightVersionResponse(former_weight_version=former)


async def _pieces(
    messages: AsyncIterator[engine_pb2.PushWeightsRequest],
) -> AsyncIterator[StagePiece]:
    async for message in messages:
        if not message.HasField("piece"):
            raise InvalidRequest("a header comes first, and once", field="header")
        yield convert.piece_from_proto(message.piece)


async def _hear_out(messages: AsyncIterator[engine_pb2.PushWeightsRequest]) -> None:
    """Lets a caller finish a short push that has failed: gRPC tells one who writes no reason."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HEAR_OUT_SECONDS):
            async for _ in messages:
                pass
