"""The RPC that checks weights."""

from __future__ import annotations

import grpc

from engine_service.core.check import Checker
from engine_service.rpc import convert_check
from engine_service.rpc.status import answers
from seedrelay.v1 import engine_pb2


class CheckingRpcs:
    """A part of the engine's servicer."""

    _checker: Checker

    @answers
    async def CheckWeights(  # noqa: N802
        self, request: engine_pb2.CheckWeightsRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.CheckWeightsResponse:
        """Says what lies in memory, and what differs."""
        del context
        report = await self._checker.check(*convert_check.check_from_proto(request))
        return convert_check.check_to_proto(report, list_tensors=request.list_tensors)
