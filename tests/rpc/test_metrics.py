"""Metrics as Prometheus reads them, scraped over HTTP from both services' collectors."""

import asyncio
import contextlib
import functools
import ssl
import urllib.error
import urllib.request

import pytest
from certificates import Authority
from fakes import FakeRunner, eventually
from prometheus_client.parser import text_string_to_metric_families

from clients.errors import CallFailed
from engine_service.config import EngineConfig
from engine_service.core.answers import answer
from engine_service.core.blocks import BlockPool
from engine_service.core.detokenizer import Detokenizer
from engine_service.core.engine import Engine
from engine_service.core.instance import Identity, Instance
from engine_service.core.request import GenerationRequest
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Sampling
from engine_service.rpc.metrics import EngineCollector
from relay_service.core.instance import State, Weights
from relay_service.core.security import Security
from relay_service.errors import ConfigError
from relay_service.rpc.metrics_server import MetricsServer
from seedrelay.v1 import weights_pb2

ANYWHERE = "127.0.0.1:0"


async def fetched(url: str, **request) -> bytes:
    """Returns the body of an answer."""

    def fetch() -> bytes:
        with urllib.request.urlopen(url, timeout=10, **request) as answer:  # noqa: S310 - ours
            return answer.read()

    return await asyncio.to_thread(fetch)


async def scraped(address: str) -> dict:
    """Returns every sample by its name and label values, these in the order of their names."""
    text = (await fetched(f"http://{address}/metrics")).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("seedrelay_")
        assert family.documentation
        for sample in family.samples:
            key = (
                sample.name.removeprefix("seedrelay_"),
                *(value for _, value in sorted(sample.labels.items())),
            )
            assert key not in samples
            samples[key] = sample.value
    return samples


async def pull(client, **options):
    """Pulls to the end."""
    return [m async for m in client.pull("target", weights_pb2.PullOptions(**options))]


async def test_a_relay(fleet, caplog):
    """Both ends of a fill between two hosts count its bytes; a later scrape never counts less."""
    caplog.set_level("INFO")
    here = await fleet.relay(metrics_listen=ANYWHERE)
    there = await fleet.relay(metrics_listen=ANYWHERE, join=here.address)
    seed, target = await fleet.seed(here), await fleet.dummy(there)
    await eventually(lambda: there._fleet.directory_reachable)
    before = await scraped(there.metrics_address)
    assert before["relay_blocks_total", "verified"] == 0
    assert before["relay_instances", "DUMMY"] == 1
    assert before["relay_directory_reachable",] == 1
    assert before["relay_sources", "complete"] == 0
    assert before["relay_sources", "nothing"] == 1
    known = await scraped(here.metrics_address)
    assert (known["relay_sources", "complete"], known["relay_sources", "incomplete"]) == (1, 0)
    await pull(fleet.client(there))
    sent, received = await scraped(here.metrics_address), await scraped(there.metrics_address)
    size = fleet.layout.weight_bytes
    assert sent["relay_bytes_total", "sent", "tcp"] == size
    assert received["relay_bytes_total", "received", "tcp"] == size
    assert received["relay_blocks_total", "verified"] == fleet.layout.block_count
    assert received["relay_blocks_total", "failed"] == 0
    assert received["relay_transfers_total", "complete"] == 1
    assert received["relay_transfer_seconds_total", "transferring"] > 0
    assert received["relay_transfers_running",] == 0
    assert (await scraped(here.metrics_address))["relay_leases",] == 0
    seed.close()
    target.close()
    await eventually(lambda: not here.holdings.records(""))
    assert ("relay_instances", "READY") not in await scraped(here.metrics_address)
    told = [r.fields for r in caplog.records if "transfer" in getattr(r, "fields", {})]
    assert {f["transfer"] for f in told} == {told[0]["transfer"]}
    assert [r.getMessage() for r in caplog.records if hasattr(r, "fields")] == [
        "transfer started", "lease acquired", "lease released", "transfer ended: complete",
    ]  # fmt: skip
    assert told[-1]["bytes"] == told[-2]["bytes"] == size
    assert told[-1]["transport"] == "tcp"
    assert "seed (tcp): complete" in told[-1]["path"]


async def test_wrong_blocks_and_running_transfers(fleet):
    """Blocks that do not match count as failed; a transfer that runs counts already."""
    relay = await fleet.relay(metrics_listen=ANYWHERE)
    seed = await fleet.seed(relay)
    await fleet.dummy(relay)
    seed.memory.arenas[0].land(0, memoryview(bytes(fleet.layout.block(0).nbytes)))
    with pytest.raises(CallFailed):
        await pull(fleet.client(relay))
    failed = await scraped(relay.metrics_address)
    assert failed["relay_blocks_total", "failed"] >= 1
    assert failed["relay_transfers_total", "CorruptBlock"] == 1
    stream = fleet.client(relay).pull(
        "target", weights_pb2.PullOptions(rate_limit_bytes_per_second=1)
    )
    await anext(stream)
    assert (await scraped(relay.metrics_address))["relay_transfers_running",] == 1
    await stream.aclose()


async def test_an_engine():
    """State, queue, KV, tokens, reasons, weights and phases are read as they are."""
    runner = FakeRunner()
    runner.workers, runner.arenas, runner.descriptors = [], [], []
    scheduler = Scheduler(Limits(64, 4, 2, 4), BlockPool(32, 4))
    instance = Instance(
        EngineConfig(model="tiny", listen=ANYWHERE), Identity("one", "life", "tiny"), runner,
        Engine(scheduler, runner), lambda _address: None,
    )  # fmt: skip
    with instance.phases.measure("load"):
        pass
    server = MetricsServer(ANYWHERE, Security())
    server.show(EngineCollector(instance))
    address = await server.start()
    found = await scraped(address)
    assert found["engine_state", "STARTING"] == 1
    assert sum(v for k, v in found.items() if k[0] == "engine_state") == 1
    assert found["engine_kv_blocks_total",] == 32
    instance.lifecycle.state = State.READY
    instance.engine.weights = Weights("v7", "ab" * 16, 3)
    stepping = asyncio.create_task(instance.engine.run())
    request = GenerationRequest(prompt=(1, 2), sampling=Sampling(), max_tokens=5)
    detokenizer = functools.partial(Detokenizer, lambda ids: " ".join(map(str, ids)))
    engine = instance.engine
    async for _ in answer(engine, request, engine.submit(request), detokenizer):
        pass
    leaving = answer(engine, request, engine.submit(request), detokenizer)
    await anext(leaving)
    await leaving.aclose()
    found = await scraped(address)
    assert found["engine_state", "READY"] == 1
    assert found["engine_requests_total", "length"] == 1
    assert found["engine_requests_total", "abort"] == 1
    assert found["engine_requests_total", "stop"] == 0
    assert 6 <= found["engine_generated_tokens_total",] <= 10
    assert (found["engine_requests_running",], found["engine_kv_blocks_used",]) == (0, 0)
    assert found["engine_weights_info", "ab" * 16, "one", "tiny", "v7"] == 1
    assert found["engine_weights_epoch",] == 3
    assert found["engine_start_phase_seconds", "load"] >= 0
    stepping.cancel()
    await asyncio.wait([stepping])
    await server.stop()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(*address.split(":"))


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 "),
        (b"HEAD /metrics?x=1 HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 "),
        (b"\xff\xfe\r\n\r\n", b"HTTP/1.1 404 "),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * (1 << 20), b""),
        (b"GET /metr", b""),
        (b"", b""),
    ],
)
async def test_callers_that_are_no_scraper(sent, answer):
    """Each gets a short answer or none, and the next scrape is served."""
    server = MetricsServer(ANYWHERE, Security())
    address = await server.start()
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(sent)
    with contextlib.suppress(OSError):
        writer.write_eof()
    got = b""
    with contextlib.suppress(ConnectionResetError):
        got = await reader.read(1 << 16)
    assert got.startswith(answer)
    assert bool(got) == bool(answer)
    writer.close()
    assert await fetched(f"http://{address}/metrics") == b""
    await server.stop()


async def test_only_for_our_certificates(tmp_path):
    """With TLS a scraper needs a certificate of the CA, and gets none but the encrypted page."""
    authority = Authority(tmp_path)
    server = MetricsServer(ANYWHERE, authority.issue("service"))
    address = await server.start()
    person = authority.issue("prometheus")
    context = ssl.create_default_context(cafile=person.tls_ca)
    with pytest.raises(OSError):  # noqa: PT011 - reset or refused, as the timing has it
        await fetched(f"https://{address}/metrics", context=context)
    context.load_cert_chain(person.tls_cert, person.tls_key)
    assert await fetched(f"https://{address}/metrics", context=context) == b""
    with pytest.raises(OSError):  # noqa: PT011
        await fetched(f"http://{address}/metrics")
    authority.issue("service", expired=True)
    with pytest.raises(OSError, match="expired"):
        await fetched(f"https://{address}/metrics", context=context)
    authority.issue("service")
    assert await fetched(f"https://{address}/metrics", context=context) == b""
    # With another CA for both, a scraper of the old one is a stranger.
    renewed = Authority(tmp_path)
    renewed.issue("service")
    context.load_verify_locations(person.tls_ca)
    with pytest.raises(OSError):  # noqa: PT011
        await fetched(f"https://{address}/metrics", context=context)
    await server.stop()


async def test_off_unless_named_and_refused_where_it_cannot_be(fleet):
    """Nothing listens by default; a taken port and an open one without TLS are refused."""
    relay = await fleet.relay()
    assert relay.metrics_address == ""
    with pytest.raises(ConfigError, match="cannot listen"):
        await MetricsServer(relay.address, Security()).start()
    with pytest.raises(ConfigError, match="beyond loopback"):
        await fleet.relay(metrics_listen="0.0.0.0:0")
