"""Streams of clients that are silent, slow or gone, and of a service that is asked to end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import grpc
from stage import DUMMY, READY, Fleet, Stage, answer, eventually, reach, request, status_of

from clients.engine import EngineClient
from clients.errors import ClientError
from clients.launch import Service
from seedrelay.v1 import engine_pb2, engine_pb2_grpc, weights_pb2

PING = 6
"""Type of a PING frame (RFC 9113, section 6.7)."""
FRAME_HEADER_BYTES = 9
UNREAD = 50


class PingCounter:
    """Stands between a client and a server, and counts connections and the client's pings."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.connections = 0
        self.pings = 0
        self._copying: list[asyncio.Future[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        """Listens; returns the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Ends every connection."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._copying)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back, forth = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, forth]
        for copy in (self._copy(reader, forth, "client"), self._copy(back, writer, "")):
            self._copying.append(asyncio.ensure_future(copy))

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: str
    ) -> None:
        with suppress(ConnectionError):  # either side may go first
            while data := await reader.read(1 << 16):
                # gRPC writes a ping of a silent connection by itself.
                is_ping = len(data) == FRAME_HEADER_BYTES + 8 and data[3] == PING and data[4] == 0
                self.pings += side == "client" and is_ping
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_pings_of_a_silent_stream_are_no_attack(fleet: Fleet) -> None:
    """A client that pings far more often than gRPC's default allows keeps its connection."""
    between = PingCounter(fleet.seed.address)
    address = await between.start()
    options = (
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        silent = stub.WatchStatus(engine_pb2.WatchStatusRequest())
        assert (await silent.read()).status.state == READY
        await eventually(lambda: between.pings >= 5)
        status = await stub.GetStatus(engine_pb2.GetStatusRequest())
        assert status.status.state == READY
        assert not silent.done()
    assert between.connections == 1
    await between.stop()


async def test_readers_that_do_not_read(stage: Stage, model: Path) -> None:
    """They hold their own tokens, no KV and nobody else; read at last, they have every token."""
    engine = stage.engine(model)
    await reach(engine)
    asked = request(max_tokens=150)
    expected = await answer(engine, asked)
    before = _resident_bytes(engine.pid)
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        unread = [stub.Generate(asked) for _ in range(UNREAD)]
        await eventually(lambda: _holds(engine, used=True))
        assert await answer(engine, asked) == expected
        await eventually(lambda: _holds(engine, used=False), seconds=60)
        assert _resident_bytes(engine.pid) - before < 64 << 20
        for call in unread:
            tokens = [t async for message in call for t in message.token_ids]
            assert tokens == expected


async def test_a_client_that_is_killed(stage: Stage, model: Path) -> None:
    """The answer of a client that is gone without a word ends early, and nobody else notices."""
    engine = stage.engine(model, "--metrics-listen", "127.0.0.1:0")
    await reach(engine)
    neighbour = request(max_tokens=200)
    alone = await answer(engine, neighbour)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "clients", "generate", "--engine", engine.address, "--json",
        "--max-tokens", "1900", "--ignore-eos", "seeds", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    await client.stdout.readline()
    beside = asyncio.ensure_future(answer(engine, neighbour))
    client.kill()
    await client.wait()
    assert await beside == alone
    await eventually(lambda: _holds(engine, used=False))
    metrics = _metrics(engine)
    assert 'seedrelay_engine_requests_total{finish_reason="abort"} 1.0' in metrics
    assert 'seedrelay_engine_requests_total{finish_reason="length"} 2.0' in metrics


async def test_the_seed_is_asked_to_end_while_it_is_read(
    stage: Stage, fleet: Fleet, model: Path
) -> None:
    """Its streams end with a final status, it exits in its grace, and its reader loses nothing."""
    seed = stage.engine(
        model, "--relay", fleet.relay.address, "--instance-name", "leaving", "--max-running", "1",
        "--grace", "1",
    )  # fmt: skip
    target = stage.engine(model, "--load-format", "dummy")
    digest = (await reach(seed)).weights_digest
    await reach(target, DUMMY)
    options = weights_pb2.PullOptions(
        rate_limit_bytes_per_second=2 << 20, source_instance="leaving"
    )
    async with EngineClient(seed.address) as asking, EngineClient(target.address) as filling:
        pull = asyncio.ensure_future(_progress(filling, fleet.relay.address, options))
        running = asking.generate(request(max_tokens=1900))
        await anext(running)
        queued = asyncio.ensure_future(_finish(asking))
        await eventually(lambda: _is_moving(target))
        os.kill(seed.pid, signal.SIGTERM)
        *_, last = [message async for message in running]
        assert last.finish_reason == engine_pb2.FINISH_REASON_ABORT
        assert await queued == engine_pb2.FINISH_REASON_ABORT
        assert seed.wait() == 0
        report = await pull
    status = await status_of(target)
    assert (status.state, status.weights_digest) == (READY, digest)
    assert report.bytes_reread == 0


def _metrics(engine: Service) -> str:
    with urllib.request.urlopen(f"http://{engine.metrics_address}/metrics") as response:
        return str(response.read(), "utf-8")


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _holds(engine: Service, *, used: bool) -> bool:
    status = await status_of(engine)
    return bool(status.kv_blocks_used) is used


async def _is_moving(target: Service) -> bool:
    progress = (await status_of(target)).progress
    return progress.source_instance == "leaving" and progress.bytes_verified > 0


async def _finish(client: EngineClient) -> int:
    try:
        *_, last = [message async for message in client.generate(request(max_tokens=8))]
    except ClientError as error:
        raise AssertionError("a queued stream got an error instead of its end") from error
    return last.finish_reason


async def _progress(
    client: EngineClient, relay: str, options: weights_pb2.PullOptions
) -> weights_pb2.PullReport:
    *_, last = [message async for message in client.pull(relay, options)]
    return last.report
