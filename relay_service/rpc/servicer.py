"""The relay's RPCs: check, one call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import grpc
from google.protobuf import duration_pb2

from relay_service.core.grants import GRANT_SECONDS, Grants
from relay_service.core.holdings import Holdings
from relay_service.core.leases import LEASE_SECONDS
from relay_service.core.logs import clean_transfer, transfer_id
from relay_service.core.match import match
from relay_service.core.registry import EXPIRY_SECONDS, MAX_TRANSFERS_PER_RELAY, Registry
from relay_service.core.transfers import Transfers
from relay_service.errors import InvalidRequest, NotFound, SourceBusy
from relay_service.rpc import convert, convert_manifest, convert_transfer
from relay_service.rpc.convert_kept import kept_to_proto
from relay_service.rpc.directory import DirectoryFleet
from relay_service.rpc.status import answers, streams
from relay_service.rpc.watching import news, progress
from seedrelay.v1 import relay_pb2, relay_pb2_grpc

_ARTIFACT_PART_BYTES = 1 << 20


class RelayServicer(relay_pb2_grpc.RelayServiceServicer):
    """Serves one relay."""

    def __init__(
        self,
        holdings: Holdings,
        registry: Registry,
        fleet: DirectoryFleet,
        transfers: Transfers,
        socket_path: str,
        grants: Grants,
        data_address: str,
    ) -> None:
        self._holdings = holdings
        self._registry = registry
        self._fleet = fleet
        self._transfers = transfers
        self._socket_path = socket_path
        self._grants = grants
        self._data_address = data_address

    @answers
    async def GetAttachment(  # noqa: N802
        self, request: relay_pb2.GetAttachmentRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.GetAttachmentResponse:
        """Returns the attachment socket and the data port."""
        del request, context
        return relay_pb2.GetAttachmentResponse(
            socket_path=self._socket_path, relay_generation=self._fleet.generation,
            data_address=self._data_address,
        )  # fmt: skip

    @answers
    async def Announce(  # noqa: N802
        self, request: relay_pb2.AnnounceRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.AnnounceResponse:
        """Takes an announcement."""
        del context
        if not request.address:
            raise InvalidRequest("an announcement needs the relay's address", field="address")
        instances = [convert.instance_from_proto(i) for i in request.instances]
        self._registry.announce(
            request.address, request.relay_generation, instances,
            [convert_transfer.from_proto(t) for t in request.transfers[:MAX_TRANSFERS_PER_RELAY]],
            (request.start_time.ToMicroseconds(), request.sequence),
        )  # fmt: skip
        return relay_pb2.AnnounceResponse(expiry=_duration(EXPIRY_SECONDS))

    @answers
    async def ListSources(  # noqa: N802
        self, request: relay_pb2.ListSourcesRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.ListSourcesResponse:
        """Judges every known instance."""
        del context
        fleet = self._fleet
        known = fleet.known() if request.without_directory else await fleet.instances()
        matches = match(convert.target_from_proto(request), known)
        return relay_pb2.ListSourcesResponse(sources=map(convert.source_to_proto, matches))

    @answers
    async def GetRelayStatus(  # noqa: N802
        self, request: relay_pb2.GetRelayStatusRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.GetRelayStatusResponse:
        """Returns fleet and transfers."""
        del request, context
        running, ended = convert_transfer.split(self._fleet.transfers())
        return relay_pb2.GetRelayStatusResponse(
            address=self._fleet.address,
            relay_generation=self._fleet.generation,
            directory=self._fleet.directory,
            directory_reachable=bool(self._fleet.directory_reachable),
            instances=[convert.instance_to_proto(i) for i in await self._fleet.instances()],
            transfers=running,
            ended_transfers=ended,
            lease_count=self._holdings.leases.count(),
            directories=[
                relay_pb2.Directory(address=one.address, reachable=bool(one.reachable))
                for one in self._fleet.directories
            ],
            kept_arenas=kept_to_proto(self._holdings.kept),
        )

    @streams
    async def WatchTransfers(  # noqa: N802
        self, request: relay_pb2.WatchTransfersRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[relay_pb2.WatchTransfersResponse]:
        """Streams what is known of transfers, until the caller leaves."""
        del context
        look = partial(self._fleet.transfers, own_only=request.own_only)
        seconds = request.interval.seconds + request.interval.nanos / 1e9
        watched = news(look, seconds) if request.HasField("interval") else news(look)
        async for states in watched:
            running, ended = convert_transfer.split(states)
            yield relay_pb2.WatchTransfersResponse(transfers=running, ended_transfers=ended)

    @streams
    async def GetManifest(  # noqa: N802
        self, request: relay_pb2.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[relay_pb2.GetManifestResponse]:
        """Pages through one rank's manifest."""
        del context
        manifest = await self._holdings.manifest(
            request.instance, request.generation, request.rank,
            staged=request.staged, epoch=request.epoch,
        )  # fmt: skip
        for page in convert_manifest.manifest_pages(manifest):
            yield page

    @streams
    async def GetArtifact(  # noqa: N802
        self, request: relay_pb2.GetArtifactRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[relay_pb2.GetArtifactResponse]:
        """Streams one artifact."""
        del context
        data = self._holdings.artifact(request.sha256)
        for start in range(0, len(data), _ARTIFACT_PART_BYTES):
            part = data[start : start + _ARTIFACT_PART_BYTES]
            yield relay_pb2.GetArtifactResponse(data=part)

    @answers
    async def AcquireLease(  # noqa: N802
        self, request: relay_pb2.AcquireLeaseRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.AcquireLeaseResponse:
        """Grants a lease."""
        del context
        transfer_id.set(clean_transfer(request.transfer))  # a call has a context of its own
        if request.epoch == 0:
            await self._holdings.filled(request.instance, request.generation)
        try:
            lease = self._holdings.acquire(
                request.instance, request.generation, request.epoch, request.weights_digest,
                request.holder, yields=request.yields,
            )  # fmt: skip
        except SourceBusy as busy:
            if not request.follows:
                raise
            return relay_pb2.AcquireLeaseResponse(sent_on=convert.sent_on_to_proto(busy))
        holding = self._holdings.get(request.instance)
        offer = holding.offered.now
        return relay_pb2.AcquireLeaseResponse(
            lease=lease.lease, expiry=_duration(LEASE_SECONDS), epoch=lease.epoch,
            probe=offer.probe if offer else holding.probe,
            upstream_instances=offer.upstream if offer else (),
        )  # fmt: skip

    @answers
    async def RenewLease(  # noqa: N802
        self, request: relay_pb2.RenewLeaseRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.RenewLeaseResponse:
        """Prolongs a lease."""
        del context
        self._holdings.leases.use(request.lease)
        return relay_pb2.RenewLeaseResponse(expiry=_duration(LEASE_SECONDS))

    @answers
    async def ReleaseLease(  # noqa: N802
        self, request: relay_pb2.ReleaseLeaseRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.ReleaseLeaseResponse:
        """Ends a lease."""
        del context
        self._holdings.leases.release(request.lease)
        return relay_pb2.ReleaseLeaseResponse()

    @answers
    async def GrantRead(  # noqa: N802
        self, request: relay_pb2.GrantReadRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.GrantReadResponse:
        """Grants connections to the data port."""
        del context
        grant = self._holdings.grant(
            request.lease, request.rank, tuple((r.first_block, r.block_count) for r in request.runs)
        )
        return relay_pb2.GrantReadResponse(
            data_address=self._data_address, expiry=_duration(GRANT_SECONDS),
            grants=self._grants.issue(grant, request.connection_count),
        )  # fmt: skip

    @streams
    async def Pull(  # noqa: N802
        self, request: relay_pb2.PullRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[relay_pb2.PullResponse]:
        """Fills a target and says how far it is; leaving the call ends the pull."""
        del context
        holding = self._holdings.get(request.instance)
        transfer = self._transfers.start(holding, convert.options_from_proto(request.options))
        try:
            async for response in progress(transfer):
                yield response
        finally:
            if not transfer.task.done():
                await self._transfers.end(holding)

    @answers
    async def ReturnMapping(  # noqa: N802
        self, request: relay_pb2.ReturnMappingRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.ReturnMappingResponse:
        """Unmaps the writable arenas, after the pull into them has ended."""
        del context
        holding = self._holdings.get(request.instance, request.generation)
        await self._transfers.end(holding)
        return relay_pb2.ReturnMappingResponse(unmapped_count=holding.return_mapping())

    @answers
    async def ForgetArena(  # noqa: N802
        self, request: relay_pb2.ForgetArenaRequest, context: grpc.aio.ServicerContext
    ) -> relay_pb2.ForgetArenaResponse:
        """Gives back what is kept for an instance."""
        del context
        if not self._holdings.forget(request.instance, "an operator ended it"):
            raise NotFound(f"no arena of {request.instance!r} is kept here", field="instance")
        return relay_pb2.ForgetArenaResponse()


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
