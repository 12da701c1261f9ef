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
from engine_service.rpc import convert, convert_answer, convert_experts, convert_request
from engine_service.rpc.admission import admitted
from engine_service.rpc.checking import CheckingRpcs
from engine_service.rpc.convert_debug import debug_to_proto
from engine_service.rpc.pausing import PausingRpcs
from engine_service.rpc.status import answers, streams
from engine_service.rpc.updating import UpdatingRpcs
from seedrelay.v1 import engine_pb2, engine_pb2_grpc

PROGRESS_SECONDS = 0.1


class EngineServicer(
    PausingRpcs, CheckingRpcs, UpdatingRpcs, engine_pb2_grpc.EngineServiceServicer
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

    @answers
    async def GetExpertMap(  # noqa: N802
        self, request: engine_pb2.GetExpertMapRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.GetExpertMapResponse:
        """Returns where experts lie."""
        del context
        return engine_pb2.GetExpertMapResponse(
            map=convert_experts.map_to_proto(self._instance, request.layers),
            epoch=self._instance.engine.weights.epoch,
        )

    @answers
    async def SetExpertMap(  # noqa: N802
        self, request: engine_pb2.SetExpertMapRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.SetExpertMapResponse:
        """Moves experts."""
        del context
        layers = convert_experts.layers_from_proto(request.layers)
        report = await self._experts.change(layers)
        weights = self._instance.engine.weights
        return engine_pb2.SetExpertMapResponse(
            map=convert_experts.map_to_proto(self._instance, layers),
            epoch=weights.epoch, weights_digest=weights.digest,
            layers_changed=report.layers, experts_moved=report.experts_moved,
            bytes_moved=report.bytes_moved, seconds_staged=report.seconds_staged,
            seconds_paused=report.seconds_paused,
        )  # fmt: skip

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
        try:
            while not fill.done():
                yield engine_pb2.PullWeightsResponse(
                    progress=convert.progress_to_proto(progress[-1])
                )
                del progress[:-1]
                await asyncio.wait([fill], timeout=PROGRESS_SECONDS)
            report = convert.report_to_proto(await fill, self._instance.lifecycle.state)
            yield engine_pb2.PullWeightsResponse(report=report)
        finally:
            fill.cancel()
