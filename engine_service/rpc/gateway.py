"""The protocol that gateways speak to vLLM's gRPC server: check, one call, convert.

Served beside our own, on the same port, from the generated code of smg-grpc-proto.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from engine_service.core.instance import Instance
from engine_service.errors import NotOffered
from engine_service.rpc import convert_gateway, convert_gateway_info
from engine_service.rpc.admission import admitted
from engine_service.rpc.status import answers, streams
from engine_service.rpc.version_metadata import VersionMetadata


class GatewayServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves one instance to gateways."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._begun = time.monotonic()

    @answers
    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Says whether it serves; an instance that doesn't yet has a name already."""
        del request, context
        return convert_gateway_info.health_to_proto(self._instance)

    @answers
    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describes the model."""
        del request, context
        return convert_gateway_info.model_info_to_proto(self._instance)

    @answers
    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Describes the server."""
        del request, context
        seconds_up = time.monotonic() - self._begun
        return convert_gateway_info.server_info_to_proto(self._instance, seconds_up)

    @answers
    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Says how busy it is."""
        del request, context
        return convert_gateway_info.loads_to_proto(self._instance)

    @streams
    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Sends the small files of the model, so that the gateway needs no copy of them."""
        del request, context
        files = convert_gateway_info.tokenizer_files(self._instance)
        data = await asyncio.to_thread(convert_gateway_info.zip_files, files)
        for chunk in convert_gateway_info.chunks_to_proto(data):
            yield chunk

    @streams
    async def Generate(  # noqa: N802
        self, request: vllm_engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        """Answers; leaving the call, or aborting it by name, frees its KV."""
        from_proto = convert_gateway.request_from_proto
        name, versions = request.request_id, VersionMetadata()
        async with admitted(self._instance, name, from_proto, request) as (wanted, pieces):
            writer = convert_gateway.AnswerWriter(request, wanted)
            async for piece in pieces:
                versions.take(piece)
                for response in writer.take(piece):
                    yield response
        context.set_trailing_metadata(versions.metadata())

    @answers
    async def Abort(  # noqa: N802
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends requests by name; gateways do so instead of leaving their calls."""
        del context
        for name in request.request_ids:
            self._instance.engine.abort(name)
        return vllm_engine_pb2.AbortResponse()

    @answers
    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Empties the prefix cache. Running requests keep their KV, so nobody waits for them."""
        del request, context
        message = f"blocks freed: {self._instance.pauser.flush()}"
        return common_pb2.FlushCacheResponse(success=True, message=message)

    @answers
    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """Refuses."""
        del request, context
        raise NotOffered("this engine makes no embeddings")

    @answers
    async def StartProfile(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> None:
        """Refuses."""
        del request, context
        raise NotOffered("this engine has no profiler")

    StopProfile = StartProfile

    @answers
    async def SubscribeKvEvents(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> None:
        """Refuses; ends a stream as well as a call, since it sends nothing."""
        del request, context
        raise NotOffered("this engine publishes no events of its KV cache")
