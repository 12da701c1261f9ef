"""Asynchronous client of the engine service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from clients.channel import open_channel
from clients.credentials import NOTHING, Credentials
from clients.engine_updates import UpdateCalls
from clients.errors import ClientError, Unreachable
from seedrelay.v1 import engine_pb2, engine_pb2_grpc, weights_pb2

CALL_SECONDS = 10.0
RECONNECT_SECONDS = 0.2
"""Time to wait before an engine that nobody answers for is asked again."""
OVERTIME_SECONDS = 5.0
"""Time for an engine to say itself that the time of a pull is over."""


class EngineClient(UpdateCalls):
    """A connection to one engine. Use it as an async context manager, or close it.

    Every method raises `Unreachable`, `DeadlineExceeded` or `CallFailed`.
    """

    def __init__(self, address: str, credentials: Credentials = NOTHING) -> None:
        self.address = address
        self.channel = open_channel(address, credentials)
        self._stub = engine_pb2_grpc.EngineServiceStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running streams end."""
        await self.channel.close()

    async def generate(
        self,
        request: engine_pb2.GenerateRequest,
        timeout: float | None = None,
        patience: float = 0.0,
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        """Streams an answer. Leaving the iterator cancels the call.

        Args:
            request: What to continue, and how.
            timeout: Seconds for everything; none for no deadline.
            patience: Seconds for which an engine that cannot be reached, or says that it isn't
                ready yet, is asked again. Never once a message has come: what was read would
                not be read again.
        """
        clock = asyncio.get_running_loop().time
        begun, began_to_answer = clock(), False
        patience = patience if timeout is None else min(patience, timeout)
        while True:
            left = None if timeout is None else max(0.0, timeout - (clock() - begun))
            try:
                async with aclosing(self._stream(self._stub.Generate(request, timeout=left))) as it:
                    async for response in it:
                        began_to_answer = True
                        yield response
            except ClientError as error:
                wait = _seconds_before_retry(error)
                if began_to_answer or wait is None or clock() + wait - begun > patience:
                    raise
            else:
                return
            await asyncio.sleep(wait)

    async def abort(self, requests: Iterable[str]) -> int:
        """Ends requests by name, with what they have; returns how many answers were ended."""
        message = engine_pb2.AbortRequest(requests=requests)
        response = await self._answer(self._stub.Abort(message, timeout=CALL_SECONDS))
        return int(response.aborted)

    async def status(self, *, debug: bool = False) -> engine_pb2.EngineStatus:
        """Returns the state of the instance; `debug` adds what to look at when it is wrong."""
        request = engine_pb2.GetStatusRequest(debug=debug)
        response = await self._answer(self._stub.GetStatus(request, timeout=CALL_SECONDS))
        status: engine_pb2.EngineStatus = response.status
        return status

    async def pause(
        self, request: engine_pb2.PauseGenerationRequest, timeout: float | None = None
    ) -> engine_pb2.PauseGenerationResponse:
        """Closes the gate and lets go of what runs; `timeout` is the call's own deadline."""
        done: engine_pb2.PauseGenerationResponse
        done = await self._answer(self._stub.PauseGeneration(request, timeout=timeout))
        return done

    async def resume(
        self, *, keep_reserved_memory: bool = False
    ) -> engine_pb2.ContinueGenerationResponse:
        """Opens the gate."""
        request = engine_pb2.ContinueGenerationRequest(keep_reserved_memory=keep_reserved_memory)
        done: engine_pb2.ContinueGenerationResponse
        done = await self._answer(self._stub.ContinueGeneration(request, timeout=CALL_SECONDS))
        return done

    async def flush(self) -> engine_pb2.FlushCacheResponse:
        """Empties the prefix cache."""
        done: engine_pb2.FlushCacheResponse
        done = await self._answer(
            self._stub.FlushCache(engine_pb2.FlushCacheRequest(), timeout=CALL_SECONDS)
        )
        return done

    async def abort_all(self) -> int:
        """Ends every request with what it has; returns how many answers were ended."""
        response = await self._answer(
            self._stub.AbortAll(engine_pb2.AbortAllRequest(), timeout=CALL_SECONDS)
        )
        return int(response.aborted)

    async def expert_map(self, layers: Iterable[int] = ()) -> engine_pb2.GetExpertMapResponse:
        """Returns where the experts of some layers lie, or of all."""
        request = engine_pb2.GetExpertMapRequest(layers=layers)
        found: engine_pb2.GetExpertMapResponse
        found = await self._answer(self._stub.GetExpertMap(request, timeout=CALL_SECONDS))
        return found

    async def set_expert_map(
        self, layers: Iterable[engine_pb2.LayerExperts], timeout: float | None = None
    ) -> engine_pb2.SetExpertMapResponse:
        """Moves experts to where some layers shall have them; an engine goes on after `timeout`."""
        request = engine_pb2.SetExpertMapRequest(layers=layers)
        done: engine_pb2.SetExpertMapResponse
        done = await self._answer(self._stub.SetExpertMap(request, timeout=timeout))
        return done

    async def recover_experts(
        self, *, replace: bool = False, source: str = "", timeout: float | None = None
    ) -> AsyncIterator[engine_pb2.RecoverExpertsResponse]:
        """Brings back what lost ranks held; the last message carries the report.

        Args:
            replace: Start ranks in the place of lost ones, also where slots of others suffice.
            source: The only source, an instance or `disk`; empty for any.
            timeout: Seconds to follow it; the engine goes on after that, and when this is left.
        """
        request = engine_pb2.RecoverExpertsRequest(replace=replace, source=source)
        call = self._stub.RecoverExperts(request, timeout=timeout)
        async with aclosing(self._stream(call)) as responses:
            async for response in responses:
                yield response

    async def scale_experts(
        self, groups: int, timeout: float | None = None
    ) -> AsyncIterator[engine_pb2.ScaleExpertsResponse]:
        """Spreads the experts over so many groups of ranks; the last message carries the report.

        The engine goes on after `timeout` seconds, and when this is left.
        """
        request = engine_pb2.ScaleExpertsRequest(expert_parallel_size=groups)
        call = self._stub.ScaleExperts(request, timeout=timeout)
        async with aclosing(self._stream(call)) as responses:
            async for response in responses:
                yield response

    async def check(
        self, request: engine_pb2.CheckWeightsRequest, timeout: float | None = None
    ) -> engine_pb2.CheckWeightsResponse:
        """Compares what lies in memory with what it should be, or was, or another one holds."""
        found: engine_pb2.CheckWeightsResponse
        found = await self._answer(self._stub.CheckWeights(request, timeout=timeout))
        return found

    async def watch(self) -> AsyncIterator[engine_pb2.EngineStatus]:
        """Yields the status now and whenever there is news, at most ten times a second."""
        async for response in self._stream(self._stub.WatchStatus(engine_pb2.WatchStatusRequest())):
            yield response.status

    async def pull(
        self, relay: str, options: weights_pb2.PullOptions
    ) -> AsyncIterator[engine_pb2.PullWeightsResponse]:
        """Fills a dummy; the last message carries the report.

        An engine that hangs is left a few seconds after the timeout of the options.
        """
        request = engine_pb2.PullWeightsRequest(relay=relay, options=options)
        limit = options.timeout.ToNanoseconds() / 1e9
        timeout = limit + OVERTIME_SECONDS if limit else None
        async for response in self._stream(self._stub.PullWeights(request, timeout=timeout)):
            yield response


def _seconds_before_retry(error: ClientError) -> float | None:
    """Returns when to ask again; none where that would be of no use, or not safe."""
    if isinstance(error, Unreachable):
        return RECONNECT_SECONDS
    return error.retry_seconds if error.code == "UNAVAILABLE" else None
