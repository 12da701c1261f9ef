"""Asynchronous client of the relay service, typed by the relay's own records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from clients.channel import open_channel, streamed
from clients.credentials import NOTHING, Credentials
from clients.errors import ClientError
from relay_service.core.grants import Run
from relay_service.core.instance import Instance
from relay_service.core.logs import transfer_id
from relay_service.core.manifest import Manifest
from relay_service.core.match import Match, Target
from relay_service.core.registry import MAX_TRANSFERS_PER_RELAY, Order
from relay_service.core.transfer_state import TransferState
from relay_service.rpc import convert, convert_manifest, convert_transfer
from seedrelay.v1 import relay_pb2, relay_pb2_grpc, weights_pb2

CALL_SECONDS = 10.0
MAX_MANIFEST_BYTES = 256 << 20


class RelayClient:
    """A connection to one relay. Use it as an async context manager, or close it.

    Every method raises `Unreachable`, `DeadlineExceeded` or `CallFailed`.
    """

    def __init__(self, address: str, credentials: Credentials = NOTHING) -> None:
        self.address = address
        self._credentials = credentials
        self._closing: set[asyncio.Task[None]] = set()
        self._failed = False
        self._open()

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
        """Closes the connection."""
        await self.channel.close()
        await asyncio.gather(*self._closing)

    async def attachment(self, timeout: float = CALL_SECONDS) -> tuple[str, str]:
        """Returns the attachment socket's path and the relay's generation."""
        self._renew()
        request = relay_pb2.GetAttachmentRequest()
        response = await self._unary(self._stub.GetAttachment(request, timeout=timeout))
        return response.socket_path, response.relay_generation

    async def data_address(self, timeout: float = CALL_SECONDS) -> str:
        """Returns the relay's data address; empty where it has none, or is too old for one."""
        request = relay_pb2.GetAttachmentRequest()
        response = await self._unary(self._stub.GetAttachment(request, timeout=timeout))
        return str(response.data_address)

    async def announce(
        self,
        address: str,
        generation: str,
        instances: list[Instance],
        timeout: float = CALL_SECONDS,
        *,
        transfers: Sequence[TransferState] = (),
        order: Order = (0, 0),
    ) -> None:
        """Announces every instance of the relay at `address`, and the transfers into them."""
        self._renew()
        request = relay_pb2.AnnounceRequest(
            address=address, relay_generation=generation,
            instances=[convert.instance_to_proto(i) for i in instances],
            transfers=map(convert_transfer.to_proto, transfers[:MAX_TRANSFERS_PER_RELAY]),
            sequence=order[1],
        )  # fmt: skip
        request.start_time.FromMicroseconds(order[0])
        await self._unary(self._stub.Announce(request, timeout=timeout))

    async def sources(
        self, target: Target, *, without_directory: bool = False, timeout: float = CALL_SECONDS
    ) -> list[Match]:
        """Lists who could fill a target, and why the others could not."""
        request = relay_pb2.ListSourcesRequest(
            instance=target.instance, without_directory=without_directory
        )
        if target.format is not None:
            request.format.CopyFrom(convert.format_to_proto(target.format))
        if target.placement is not None:
            request.placement.CopyFrom(convert.placement_to_proto(target.placement))
        response = await self._unary(self._stub.ListSources(request, timeout=timeout))
        return [
            Match(convert.instance_from_proto(s.instance), s.reason, s.recut)
            for s in response.sources
        ]

    async def status(self) -> relay_pb2.GetRelayStatusResponse:
        """Returns the relay's fleet and its running transfers."""
        request = relay_pb2.GetRelayStatusRequest()
        response: relay_pb2.GetRelayStatusResponse = await self._unary(
            self._stub.GetRelayStatus(request, timeout=CALL_SECONDS)
        )
        return response

    async def watch_transfers(
        self, *, own_only: bool = False, interval_seconds: float = 1.0
    ) -> AsyncGenerator[relay_pb2.WatchTransfersResponse]:
        """Streams the transfers of the fleet, or only this relay's: on news, and at an interval."""
        request = relay_pb2.WatchTransfersRequest(own_only=own_only)
        request.interval.FromNanoseconds(int(interval_seconds * 1e9))
        call = self._stub.WatchTransfers(request)
        async with contextlib.aclosing(self._stream(call)) as responses:
            async for response in responses:
                yield response

    async def manifest(
        self, instance: str, generation: str, rank: int, *, staged: bool = False, epoch: int = 0
    ) -> Manifest:
        """Returns one rank's manifest, or that of what was staged for it; it isn't checked yet.

        With `epoch` it is of these weights, or an error says that there are others.
        Raises `ValueError` for one that would not end.
        """
        request = relay_pb2.GetManifestRequest(
            instance=instance, generation=generation, rank=rank, staged=staged, epoch=epoch
        )
        call = self._stub.GetManifest(request, timeout=CALL_SECONDS)
        pages, size = [], 0
        async for page in self._stream(call):
            pages.append(page)
            size += page.ByteSize()
            if size > MAX_MANIFEST_BYTES:
                raise ValueError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes")
        return convert_manifest.manifest_from_pages(rank, pages)

    async def artifact(self, sha256: str, limit_bytes: int) -> bytes:
        """Returns an artifact's content. Raises `ValueError` beyond `limit_bytes`."""
        content = bytearray()
        request = relay_pb2.GetArtifactRequest(sha256=sha256)
        async for part in self._stream(self._stub.GetArtifact(request, timeout=CALL_SECONDS)):
            content += part.data
            if len(content) > limit_bytes:
                raise ValueError(f"artifact {sha256} is longer than {limit_bytes} bytes")
        return bytes(content)

    async def acquire_lease(
        self, source: Instance, holder: str, *, yields: bool = False
    ) -> relay_pb2.AcquireLeaseResponse:
        """Takes a lease on a source's weights; who `yields` is sent on by one that is busy."""
        request = relay_pb2.AcquireLeaseRequest(
            instance=source.instance, generation=source.generation, epoch=source.weights.epoch,
            weights_digest=source.weights.digest, holder=holder, transfer=transfer_id.get(),
            yields=yields, follows=True,
        )  # fmt: skip
        response: relay_pb2.AcquireLeaseResponse = await self._unary(
            self._stub.AcquireLease(request, timeout=CALL_SECONDS)
        )
        return response

    async def grant_read(
        self, lease: str, rank: int, runs: Sequence[Run], connections: int
    ) -> tuple[str, list[bytes]]:
        """Returns the data address and tokens for at most so many connections to it."""
        request = relay_pb2.GrantReadRequest(
            lease=lease, rank=rank, connection_count=connections,
            runs=[relay_pb2.BlockRun(first_block=f, block_count=c) for f, c in runs],
        )  # fmt: skip
        response = await self._unary(self._stub.GrantRead(request, timeout=CALL_SECONDS))
        return response.data_address, list(response.grants)

    async def release_lease(self, lease: str, timeout: float = CALL_SECONDS) -> None:
        """Gives a lease back."""
        request = relay_pb2.ReleaseLeaseRequest(lease=lease)
        await self._unary(self._stub.ReleaseLease(request, timeout=timeout))

    async def pull(
        self, instance: str, options: weights_pb2.PullOptions
    ) -> AsyncGenerator[relay_pb2.PullResponse]:
        """Fills an attached target; the last message carries the report."""
        request = relay_pb2.PullRequest(instance=instance, options=options)
        async with contextlib.aclosing(self._stream(self._stub.Pull(request))) as responses:
            async for response in responses:
                yield response

    async def return_mapping(self, instance: str, generation: str, timeout: float) -> int:
        """Has the writable arenas unmapped; returns how many were."""
        request = relay_pb2.ReturnMappingRequest(instance=instance, generation=generation)
        response = await self._unary(self._stub.ReturnMapping(request, timeout=timeout))
        return int(response.unmapped_count)

    async def forget_arena(self, instance: str) -> None:
        """Has memory given back that is kept for an instance which has ended."""
        request = relay_pb2.ForgetArenaRequest(instance=instance)
        await self._unary(self._stub.ForgetArena(request, timeout=CALL_SECONDS))

    def _open(self) -> None:
        self.channel = open_channel(self.address, self._credentials)
        self._stub = relay_pb2_grpc.RelayServiceStub(self.channel)

    def _renew(self) -> None:
        """Connects anew when the certificate has changed, or when nobody answered before.

        A channel keeps the certificate that it opened with; and one that failed to connect
        says for a while that it did, although somebody may listen by now. Called where a
        connection that lasts begins or repeats; calls that run may finish.
        """
        if not (self._failed or self.channel.is_stale):
            return
        self._failed = False
        closing = asyncio.create_task(self.channel.close(CALL_SECONDS))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._open()

    async def _unary(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            self._failed = error.code() is grpc.StatusCode.UNAVAILABLE
            raise ClientError.of(error, self.address) from error

    def _stream(self, call: Any) -> AsyncGenerator[Any]:
        return streamed(call, self.address)
