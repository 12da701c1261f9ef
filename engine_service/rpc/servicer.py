"""The engine's RPCs: check, one call, convert."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from engine_service.core.answers import gathered
from engine_service.core.check import Checker
from engine_service.core.expert_moves import ExpertMoves
from engine_service.core.fill import Filler
from engine_service.core.instance import Instance
from engine_service.core.ports import FillProgress
from engine_service.core.update_sessions import UpdateSessions
from engine_service.core.watching import news
from engine_service.errors import InvalidRequest
from engine_service.rpc import convert, convert_answer, convert_request
from engine_service.rpc.admission import admitted
from engine_service.rpc.checking import CheckingRpcs
from engine_service.rpc.convert_debug import debug_to_proto
from engine_service.rpc.expert_rpcs import ExpertRpcs
from engine_service.rpc.following import following
from engine_service.rpc.pausing import PausingRpcs
from engine_service.rpc.status import answers, streams
from engine_service.rpc.updating import UpdatingRpcs
from seedrelay.v1 import engine_pb2, engine_pb2_grpc


class EngineServicer(
    PausingRpcs, CheckingRpcs, UpdatingRpcs, ExpertRpcs, engine_pb2_grpc.EngineServiceServicer
):
    """Serves one instance."""

    def __init__(self, instance: Instance, filler: Filler) -> None:
        self._instance = instance
        self._filler = filler
        self._experts = ExpertMoves(instance)
        self._checker = Checker(instance)
        self._updates = UpdateSessions(instance)

    @property
    def updates(self) -> UpdateSessions:
        """Who updates the weights."""
        return self._updates

    @streams
    async def Generate(  # noqa: N802
        self, request: engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        """Streams an answer; leaving the call frees its KV."""
        del context
        interval = convert_request.stream_interval(request)
        from_proto = convert_request.request_from_proto
        async with (
            admitted(self._instance, request.request, from_proto, request) as (_, pieces),
            contextlib.aclosing(gathered(pieces, interval)) as messages,
        ):
            async for piece in messages:
                yield convert_answer.piece_to_proto(piece)

    @answers
    async def Abort(  # noqa: N802
        self, request: engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.AbortResponse:
        """Ends requests by name."""
        del context
        engine = self._instance.engine
        return engine_pb2.AbortResponse(aborted=sum(map(engine.abort, set(request.requests))))

    @answers
    async def GetStatus(  # noqa: N802
        self, request: engine_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.GetStatusResponse:
        """Returns the state."""
        del context
        status = convert.status_to_proto(self._instance)
        if request.debug:
            status.debug.CopyFrom(await debug_to_proto(self._instance, self._updates.current))
        return engine_pb2.GetStatusResponse(status=status)

    @streams
    async def WatchStatus(  # noqa: N802
        self, request: engine_pb2.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.WatchStatusResponse]:
        """Returns the status now and whenever there is news."""
        del request, context
        async with contextlib.aclosing(news(self._instance)) as pieces:
            async for _ in pieces:
                yield engine_pb2.WatchStatusResponse(status=convert.status_to_proto(self._instance))

    @streams
    async def PullWeights(  # noqa: N802
        self, request: engine_pb2.PullWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.PullWeightsResponse]:
        """Fills the instance and says how far it is; leaving the call ends the fill."""
        del context
        if not request.relay:
            raise InvalidRequest("a relay is needed", field="relay")
        progress = [FillProgress(phase="attaching")]
        options = convert.options_from_proto(request.options)
        fill = asyncio.ensure_future(self._filler.fill(request.relay, options, progress.append))
        async with contextlib.aclosing(following(fill, lambda: progress[-1])) as steps:
            async for step in steps:
                yield engine_pb2.PullWeightsResponse(progress=convert.progress_to_proto(step))
                del progress[:-1]
        report = convert.report_to_proto(await fill, self._instance.lifecycle.state)
        yield engine_pb2.PullWeightsResponse(report=report)
