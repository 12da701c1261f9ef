"""The RPCs that say and change which ranks hold which experts: check, one call, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import grpc

from engine_service.core.expert_moves import ExpertMoves, known
from engine_service.core.instance import Instance
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)
from engine_service.core.ports import ExpertRecovery
from engine_service.errors import WrongState
from engine_service.rpc import convert_experts as convert
from engine_service.rpc.convert_membership import membership_to_proto, progress_to_proto
from engine_service.rpc.following import following
from engine_service.rpc.status import answers, streams
from seedrelay.v1 import engine_pb2


class ExpertRpcs:
    """Shows, moves, recovers and scales the experts of one instance."""

    _instance: Instance
    _experts: ExpertMoves

    @answers
    async def GetExpertMap(  # noqa: N802
        self, request: engine_pb2.GetExpertMapRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.GetExpertMapResponse:
        """Returns where experts lie, and who computes together."""
        del context
        last = self._instance.recoveries.last
        return engine_pb2.GetExpertMapResponse(
            map=convert.map_to_proto(self._instance, request.layers),
            epoch=self._instance.engine.weights.epoch,
            membership=membership_to_proto(self._instance),
            last_report=convert.done_to_proto(last) if last else None,
        )

    @answers
    async def SetExpertMap(  # noqa: N802
        self, request: engine_pb2.SetExpertMapRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.SetExpertMapResponse:
        """Moves experts."""
        del context
        layers = convert.layers_from_proto(request.layers)
        report = await self._experts.change(layers)
        weights = self._instance.engine.weights
        return engine_pb2.SetExpertMapResponse(
            map=convert.map_to_proto(self._instance, layers),
            epoch=weights.epoch, weights_digest=weights.digest,
            layers_changed=report.layers, experts_moved=report.experts_moved,
            bytes_moved=report.bytes_moved, seconds_staged=report.seconds_staged,
            seconds_paused=report.seconds_paused,
        )  # fmt: skip

    @streams
    async def RecoverExperts(  # noqa: N802
        self, request: engine_pb2.RecoverExpertsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.RecoverExpertsResponse]:
        """Brings back what lost ranks held; leaving the call ends nothing."""
        del context
        recovery = self._recovery()
        options = RecoverOptions(replace=request.replace, source=request.source)
        async with aclosing(self._follow(lambda tell: recovery.recover(options, tell))) as steps:
            async for progress, report in steps:
                yield engine_pb2.RecoverExpertsResponse(progress=progress, report=report)

    @streams
    async def ScaleExperts(  # noqa: N802
        self, request: engine_pb2.ScaleExpertsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.ScaleExpertsResponse]:
        """Spreads experts over other groups of ranks; leaving the call ends nothing."""
        del context
        recovery, groups = self._recovery(), convert.groups_from_proto(request)
        async with aclosing(self._follow(lambda tell: recovery.scale(groups, tell))) as steps:
            async for progress, report in steps:
                yield engine_pb2.ScaleExpertsResponse(progress=progress, report=report)

    async def _follow(
        self, begin: Callable[[OnExpertProgress], Awaitable[ExpertReport]]
    ) -> AsyncGenerator[tuple[engine_pb2.ExpertProgress, engine_pb2.ExpertReport | None]]:
        """Yields how far it is, and at last what was done."""
        told = [ExpertProgress(phase="planning")]
        work = asyncio.ensure_future(begin(told.append))
        async with aclosing(following(work, lambda: told[-1])) as steps:
            async for progress in steps:
                yield progress_to_proto(progress), None
                del told[:-1]
        report = convert.report_to_proto(self._instance, await work)
        yield progress_to_proto(told[-1]), report

    def _recovery(self) -> ExpertRecovery:
        known(self._instance)
        if self._instance.recovery is None:
            raise WrongState(
                f"the ranks of {self._instance.identity.name} cannot be replaced",
                field="device", hint="start it with --device cpu and --ep above 1",
            )  # fmt: skip
        return self._instance.recovery
