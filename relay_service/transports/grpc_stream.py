"""Streams blocks from another relay over gRPC: works everywhere, from any language.

The only file of the transports that speaks gRPC. Both ends bypass the generated
serialiser of the data message: it would copy each block twice more.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc

from clients.credentials import NOTHING, Credentials
from clients.errors import ClientError
from clients.relay import RelayClient
from relay_service.core.grants import Run
from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.instance import FILLING_EPOCH, Instance
from relay_service.core.manifest import Manifest
from relay_service.core.patience import Patience
from relay_service.core.ports import Land
from relay_service.core.rate import Limits, TokenBucket
from relay_service.errors import (
    EpochChanged,
    LeaseEnded,
    NotYet,
    ReadsFromReader,
    RelayError,
    SourceBusy,
    SourceFailed,
)
from relay_service.rpc.convert import sent_on_from_proto
from relay_service.rpc.status import abort_with
from relay_service.transports.block_codec import decode_block, encode_block
from seedrelay.v1 import relay_pb2

_SERVICE = "seedrelay.v1.BlockService"
_METHOD = "ReadBlocks"
STALL_SECONDS = 10.0
PROBE_SECONDS = 3.0
RELEASE_SECONDS = 1.0
"""Giving a lease back is a courtesy: it ends by itself, and a pull must end in time."""


class GrpcTransport:
    """Reaches the relay that announced a source, at its address."""

    name = "grpc"

    def __init__(self, credentials: Credentials = NOTHING) -> None:
        self._credentials = credentials

    async def unusable(self, source: Instance) -> str:
        """Says so when the source's relay does not answer."""
        async with RelayClient(source.address, self._credentials) as relay:
            try:
                await relay.attachment(timeout=PROBE_SECONDS)
            except ClientError as error:
                return f"{source.address} does not answer: {error}"
        return ""

    async def data_address(self, source: Instance) -> str:
        """Asks for the data address of the source's relay; empty where it has none.

        Raises `SourceFailed` when it does not answer.
        """
        async with RelayClient(source.address, self._credentials) as relay:
            try:
                return await relay.data_address(timeout=PROBE_SECONDS)
            except ClientError as error:
                raise SourceFailed(f"{source.address} does not answer: {error}") from error

    async def open(self, source: Instance, holder: str, *, yields: bool = False) -> GrpcSession:
        """Takes a lease for `holder`. Raises `SourceFailed`, or what the source refuses with."""
        relay = RelayClient(source.address, self._credentials)
        try:
            lease = await relay.acquire_lease(source, holder, yields=yields)
        except BaseException as error:
            await relay.close()
            if isinstance(error, ClientError):
                raise _kind_of(error)(str(error), **error.details) from error
            raise
        if lease.HasField("sent_on"):
            await relay.close()
            raise sent_on_from_proto(source.instance, lease.sent_on)
        return GrpcSession(relay, source, lease, self._credentials)


class GrpcSession:
    """A lease at another relay."""

    def __init__(
        self,
        relay: RelayClient,
        source: Instance,
        lease: relay_pb2.AcquireLeaseResponse,
        credentials: Credentials = NOTHING,
    ) -> None:
        self._relay = relay
        self._credentials = credentials
        self._source = source
        self._lease = lease.lease
        self.epoch = lease.epoch
        """Epoch at which the lease reads; a source that is incomplete has one of its own."""
        self._probe = lease.probe
        self.upstream = tuple(lease.upstream_instances)

    async def manifest(self, rank: int, holder: Instance | None = None) -> Manifest:
        """Returns the manifest of one rank, from whoever holds the same one."""
        if holder:
            # What it holds by now may be another one, and then the source is asked after all.
            with contextlib.suppress(ClientError, ValueError):
                async with RelayClient(holder.address, self._credentials) as relay:
                    return await relay.manifest(
                        holder.instance, holder.generation, rank, epoch=FILLING_EPOCH
                    )
        try:
            source = self._source
            return await self._relay.manifest(
                source.instance, source.generation, rank, epoch=self.epoch
            )
        except (ClientError, ValueError) as error:
            raise _kind_of(error)(str(error)) from error

    async def probe(self) -> bytes:
        """Returns the probe that the source recorded; empty where it has none."""
        return self._probe

    async def grant(
        self, rank: int, runs: Sequence[Run], connections: int
    ) -> tuple[str, list[bytes]]:
        """Asks for connections to the data port, on which blocks are read without gRPC."""
        try:
            return await self._relay.grant_read(self._lease, rank, runs, connections)
        except (ClientError, ValueError) as error:  # no index that fits into a message
            raise _kind_of(error)(str(error)) from error

    async def read(self, rank: int, blocks: Sequence[int], land: Land, limit: TokenBucket) -> None:
        """Reads one stream of blocks and lands each one as it comes."""
        request = relay_pb2.ReadBlocksRequest(lease=self._lease, rank=rank, blocks=blocks)
        method = self._relay.channel.unary_stream(
            f"/{_SERVICE}/{_METHOD}",
            request_serializer=relay_pb2.ReadBlocksRequest.SerializeToString,
            response_deserializer=None,
        )
        call, failure = method(request), None
        try:
            async with Patience(STALL_SECONDS) as patience:
                for index in blocks:
                    await limit.take(self._land(index, await patience.wait(call.read()), land))
        except BaseException as error:  # noqa: BLE001 - raised below
            failure = _translated(error, self._source)
        finally:
            call.cancel()
            del call
        if failure:
            # What it went through would keep the call, and the call the connection, until
            # the garbage collector comes by; a relay that idles may never see it.
            failure.__context__ = failure.__cause__ = None
            raise failure.with_traceback(None)

    def _land(self, index: int, message: bytes, land: Land) -> int:
        if message is grpc.aio.EOF:
            raise SourceFailed("the stream ended early")
        block, epoch, data = decode_block(message)
        if block != index:
            raise SourceFailed(f"block {block} came where {index} was asked for")
        if epoch != self.epoch:
            raise EpochChanged(f"{self._source.instance} is at epoch {epoch} by now")
        land(block, data)
        return len(data)

    async def close(self) -> None:
        """Gives the lease back; a dead source is no error."""
        try:
            with contextlib.suppress(ClientError):
                await self._relay.release_lease(self._lease, RELEASE_SECONDS)
        finally:
            await self._relay.close()


class BlockServicer:
    """Serves blocks out of the arenas of this relay's holdings."""

    def __init__(self, holdings: Holdings, egress: TokenBucket) -> None:
        self._holdings = holdings
        self._egress = egress

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns what a server registers."""
        method = grpc.unary_stream_rpc_method_handler(
            self._read_blocks,
            request_deserializer=relay_pb2.ReadBlocksRequest.FromString,
            response_serializer=None,
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})

    async def _read_blocks(
        self, request: relay_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        broke_off = True
        try:
            for index in request.blocks:
                await self._holdings.arrival(request.lease, request.rank, index)
                holding, message = self._read(request.lease, request.rank, index)
                await Limits(self._egress, holding.egress).take(len(message))
                yield message
            broke_off = False
        except IndexError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"there is no block {error}")
        except RelayError as error:
            await abort_with(context, error)
        finally:
            if broke_off:
                self._holdings.leases.break_off(request.lease)

    def _read(self, lease: str, rank: int, index: int) -> tuple[Holding, bytes]:
        held, holding = self._holdings.leased(lease)
        block = holding.manifest(rank, epoch=held.epoch).block(index)
        with holding.reading(rank, held.epoch, index) as arena:
            message = encode_block(index, held.epoch, arena.view(block.offset, block.nbytes))
        self._holdings.leases.served(held, GrpcTransport.name, block.nbytes)
        return holding, message


def _translated(error: BaseException, source: Instance) -> BaseException:
    if isinstance(error, TimeoutError):
        return SourceFailed(f"no block for {STALL_SECONDS:g} s")
    if not isinstance(error, grpc.aio.AioRpcError):
        return error
    failed = ClientError.of(error, source.address)
    return _kind_of(failed)(str(failed))


def _kind_of(error: ClientError | ValueError) -> type[RelayError]:
    kinds = (EpochChanged, LeaseEnded, NotYet, ReadsFromReader, SourceBusy)
    reason = error.reason if isinstance(error, ClientError) else ""
    return next((kind for kind in kinds if kind.__name__ == reason), SourceFailed)
