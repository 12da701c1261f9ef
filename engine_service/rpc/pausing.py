"""RPCs that pause an instance and let it go on: check, one call, convert."""

from __future__ import annotations

from urllib.parse import unquote

import grpc

from engine_service.core.instance import Instance
from engine_service.rpc import convert_pause
from engine_service.rpc.convert import state_to_proto
from engine_service.rpc.status import answers
from seedrelay.v1 import engine_pb2


class PausingRpcs:
    """The pausing part of the engine's service."""

    _instance: Instance

    @answers
    async def PauseGeneration(  # noqa: N802
        self, request: engine_pb2.PauseGenerationRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.PauseGenerationResponse:
        """Closes the gate; a caller who leaves while it waits leaves nothing behind."""
        asked = convert_pause.pause_from_proto(request, caller(context))
        report = await self._instance.pauser.pause(asked)
        state = state_to_proto(self._instance.lifecycle.state)
        return convert_pause.pause_to_proto(report, state)

    @answers
    async def ContinueGeneration(  # noqa: N802
        self, request: engine_pb2.ContinueGenerationRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.ContinueGenerationResponse:
        """Opens the gate."""
        del context
        keep = request.keep_reserved_memory
        report = await self._instance.pauser.resume(keep_reserved=keep)
        return convert_pause.resume_to_proto(report)

    @answers
    async def FlushCache(  # noqa: N802
        self, request: engine_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.FlushCacheResponse:
        """Empties the prefix cache."""
        del request, context
        return engine_pb2.FlushCacheResponse(
            flushed_blocks=self._instance.pauser.flush(),
            blocks_in_use=self._instance.engine.scheduler.pool.used,
        )

    @answers
    async def AbortAll(  # noqa: N802
        self, request: engine_pb2.AbortAllRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.AbortAllResponse:
        """Ends every request with what it has."""
        del request, context
        return engine_pb2.AbortAllResponse(aborted=self._instance.pauser.abort_all())


def caller(context: grpc.aio.ServicerContext) -> str:
    """Returns the address of whoever calls, as gRPC writes it: `ipv4:127.0.0.1:5000`."""
    return unquote(str(context.peer()))
