"""The engine's RPCs: check, one call, convert."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from engine_service.core.detokenizer import Detokenizer
from engine_service.core.fill import Filler
from engine_service.core.instance import Instance
from engine_service.core.ports import FillProgress
from engine_service.core.request import GenerationRequest, TokenEvent
from engine_service.core.tokenizer import TextCodec
from engine_service.core.versions import Spans
from engine_service.errors import InvalidRequest, NotReady
from engine_service.rpc import convert, convert_request
from engine_service.rpc.status import answers, streams
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2, engine_pb2_grpc

PROGRESS_SECONDS = 0.1


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one instance."""

    def __init__(self, instance: Instance, filler: Filler) -> None:
        self._instance = instance
        self._filler = filler

    @streams
    async def Generate(  # noqa: N802
        self, request: engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        """Streams an answer; leaving the call frees its KV."""
        del context
        codec = self._ready_codec()
        wanted = convert_request.request_from_proto(request, codec)
        answer = _Answer(wanted, codec.detokenizer())
        async with contextlib.aclosing(self._instance.engine.generate(wanted)) as events:
            async for event in events:
                yield answer.chunk(event)

    @answers
    async def GetStatus(  # noqa: N802
        self, request: engine_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.GetStatusResponse:
        """Returns the state."""
        del request, context
        return engine_pb2.GetStatusResponse(status=convert.status_to_proto(self._instance))

    @streams
    async def WatchStatus(  # noqa: N802
        self, request: engine_pb2.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.WatchStatusResponse]:
        """Returns the state now and at every change."""
        del request, context
        async with contextlib.aclosing(self._instance.lifecycle.watch()) as states:
            async for _ in states:
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

    def _ready_codec(self) -> TextCodec:
        lifecycle, codec = self._instance.lifecycle, self._instance.codec
        if lifecycle.state is not State.READY or codec is None:
            reason = f": {lifecycle.reason}" if lifecycle.reason else ""
            raise NotReady(
                f"{self._instance.identity.name} is {lifecycle.state}{reason}",
                field="state", expected="READY", found=str(lifecycle.state),
            )  # fmt: skip
        return codec


class _Answer:
    """Turns the events of one answer into messages."""

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._spans = Spans()

    def chunk(self, event: TokenEvent) -> engine_pb2.GenerateResponse:
        """Returns the message of one event; an end token has an id and no text."""
        response = engine_pb2.GenerateResponse(
            weight_version=event.weights.version, epoch=event.weights.epoch
        )
        if event.token is not None:
            self._spans.add(event.weights)
            response.token_ids.append(event.token)
            if event.token not in self._request.stop_ids:
                response.text = self._detokenizer.push(event.token)
        if event.finish:
            response.text += self._detokenizer.flush()
            response.finish_reason = convert_request.FINISH[event.finish]
            usage = convert_request.usage_to_proto(self._request, self._spans.tokens)
            response.usage.CopyFrom(usage)
            response.version_spans.extend(convert_request.spans_to_proto(self._spans.spans))
        return response
