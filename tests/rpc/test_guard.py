"""Mutual TLS and scoped tokens over real sockets, on both services' servers."""

import dataclasses

import grpc
import pytest
from certificates import ALL_SCOPES, TOKEN, Authority, Tokens
from fakes import same_weights
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from clients.channel import open_channel
from clients.credentials import Credentials
from clients.errors import CallFailed, Unreachable
from clients.relay import RelayClient
from engine_service.rpc import server as engine_rpc
from relay_service.core.match import Target
from relay_service.core.security import Security
from relay_service.core.tokens import SCOPES
from relay_service.rpc import server as relay_rpc
from seedrelay.v1 import engine_pb2, relay_pb2, weights_pb2

OTHER = "another-token-of-somebody"


@pytest.fixture
def authority(tmp_path):
    """The CA that the services trust."""
    return Authority(tmp_path)


@pytest.fixture
def tokens(tmp_path):
    """A token file with one token that may do everything."""
    file = Tokens(tmp_path / "tokens")
    file.write(f"{ALL_SCOPES} {TOKEN}")
    return file


async def asked(address: str, credentials: Credentials) -> None:
    """Makes one call over a new connection."""
    async with RelayClient(address, credentials) as client:
        await client.attachment(timeout=5)


def secured(authority: Authority, tokens: Tokens | None, name: str = "relay", **changes):
    """Returns settings with a certificate and, if there are any, tokens."""
    path = str(tokens.path) if tokens else ""
    return dataclasses.replace(authority.issue(name, **changes), token_file=path)


async def test_metadata_has_a_limit(fleet, tokens):
    """Metadata beyond the limit is refused, and the connection goes on."""
    relay = await fleet.relay(security=_tokens_only(tokens))
    async with grpc.aio.insecure_channel(relay.address) as channel:
        method = channel.unary_unary("/seedrelay.v1.RelayService/GetAttachment")
        token = ("authorization", f"Bearer {TOKEN}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(b"", metadata=(token, ("x", "y" * (20 << 10))))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await method(b"", metadata=(token,))


def test_every_method_has_scopes():
    """The tables name every method of every service, nothing else, and no unknown scope."""
    for table, files in (
        (engine_rpc.SCOPES, (engine_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR)),
        (relay_rpc.SCOPES, (relay_pb2.DESCRIPTOR,)),
    ):
        services = [s for file in files for s in file.services_by_name.values()]
        assert set(table) == {f"/{s.full_name}/{m.name}" for s in services for m in s.methods}
        assert all(scopes and scopes <= SCOPES for scopes in table.values())


@pytest.mark.parametrize("service", ["engine", "relay"])
@pytest.mark.parametrize("granted", [None, *sorted(SCOPES)])
async def test_the_table_is_enforced(service, granted, tokens):
    """Each method lets exactly the scopes of its table in; the handlers here are nobody's."""
    rpc = {"engine": engine_rpc, "relay": relay_rpc}[service]
    server = rpc.new_server(Credentials(_tokens_only(tokens)))
    tokens.write(f"{granted or 'relay'} {TOKEN}")

    async def reached(request, context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "reached")

    for method in rpc.SCOPES:
        service_name, name = method[1:].split("/")
        handler = grpc.unary_unary_rpc_method_handler(reached)
        generic = grpc.method_handlers_generic_handler(service_name, {name: handler})
        server.add_generic_rpc_handlers((generic,))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    metadata = (("authorization", f"Bearer {TOKEN}"),) if granted else ()
    async with grpc.aio.insecure_channel(address) as channel:
        for method, scopes in rpc.SCOPES.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(b"", metadata=metadata)
            expected = grpc.StatusCode.UNAUTHENTICATED
            if granted:
                allowed = granted in scopes
                denied = grpc.StatusCode.PERMISSION_DENIED
                expected = grpc.StatusCode.DATA_LOSS if allowed else denied
            assert refused.value.code() is expected, method
            assert TOKEN not in refused.value.details()
    await server.stop(0)


def _tokens_only(tokens: Tokens) -> Security:
    return Security(token_file=str(tokens.path))


@pytest.mark.parametrize(
    "headers",
    [
        [f"Bearer {TOKEN}x"], [f"Bearer {TOKEN[:-1]}"], [TOKEN], [f"Basic {TOKEN}"], ["Bearer "],
        [f"Bearer  {TOKEN}"], [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
    ],
)  # fmt: skip
async def test_headers_that_are_no_token(fleet, tokens, headers):
    """Anything but one exact bearer token is unauthenticated, also for a stream."""
    relay = await fleet.relay(security=_tokens_only(tokens))
    metadata = tuple(("authorization", header) for header in headers)
    async with grpc.aio.insecure_channel(relay.address) as channel:
        call = channel.unary_stream("/seedrelay.v1.BlockService/ReadBlocks")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", metadata=metadata).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_open_and_unknown_methods_are_unknown(fleet, tokens):
    """A probe needs no token; a method that isn't there says so, as `status` relies on."""
    relay = await fleet.relay(security=_tokens_only(tokens))
    async with grpc.aio.insecure_channel(relay.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/seedrelay.v1.EngineService/GetStatus")(b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_mutual_tls(fleet, authority, tokens, tmp_path):
    """Only a client with a live certificate of the right CA gets through, and only over TLS."""
    relay = await fleet.relay(security=secured(authority, tokens))
    await asked(relay.address, Credentials(secured(authority, tokens, "client")))
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other")
    strange = dataclasses.replace(secured(stranger, tokens, "s"), tls_ca=str(authority.path))
    unsure = dataclasses.replace(secured(authority, tokens, "u"), tls_ca=str(stranger.path))
    bare = dataclasses.replace(secured(authority, tokens, "b"), tls_cert="", tls_key="")
    expired = secured(authority, tokens, "expired", expired=True)
    for refused in (strange, unsure, bare, expired, _tokens_only(tokens)):
        with pytest.raises(Unreachable):
            await asked(relay.address, Credentials(refused))
    await asked(relay.address, Credentials(secured(authority, tokens, "client")))
    with pytest.raises(CallFailed) as unknown:
        await asked(relay.address, Credentials(secured(authority, None, "client")))
    assert unknown.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("changes", [{"expired": True}, {"host": "127.0.0.2"}])
async def test_a_client_refuses_the_server(fleet, authority, tokens, changes):
    """A server whose certificate is over, or is another host's, is not talked to."""
    relay = await fleet.relay(security=secured(authority, tokens, **changes))
    with pytest.raises(Unreachable):
        await asked(relay.address, Credentials(secured(authority, tokens, "client")))


async def test_the_certificate_changes_without_a_restart(fleet, authority, tokens, caplog):
    """The next handshake shows a new certificate; a broken one changes nothing; calls go on."""
    relay = await fleet.relay(security=secured(authority, tokens))
    credentials = Credentials(secured(authority, tokens, "client"))
    async with RelayClient(relay.address, credentials) as lasting:
        await lasting.attachment()
        authority.issue("relay", expired=True)
        with pytest.raises(Unreachable):
            await asked(relay.address, credentials)
        await lasting.attachment()  # its handshake is done
        authority.issue("relay")
        await asked(relay.address, credentials)
        (authority.folder / "relay.key").write_bytes(b"broken")
        await asked(relay.address, credentials)
        assert caplog.text.count("stays in use") == 1
        await lasting.attachment()


async def test_a_client_takes_its_new_certificate(fleet, authority, tokens):
    """A client that lasts connects anew with the certificate that is there by now."""
    relay = await fleet.relay(security=secured(authority, tokens))
    credentials = Credentials(secured(authority, tokens, "client", expired=True))
    async with RelayClient(relay.address, credentials) as client:
        with pytest.raises(Unreachable):
            await client.attachment()
        authority.issue("client")
        await client.attachment()


async def test_tokens_change_on_a_live_connection(fleet, tokens):
    """The next call counts: both ends read the file again, and a revoked token is out."""
    relay = await fleet.relay(security=_tokens_only(tokens))
    async with RelayClient(relay.address, Credentials(_tokens_only(tokens))) as client:
        await client.attachment()
        tokens.write(f"relay {OTHER}")
        await client.attachment()
        async with grpc.aio.insecure_channel(relay.address) as channel:
            method = channel.unary_unary("/seedrelay.v1.RelayService/GetAttachment")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(b"", metadata=(("authorization", f"Bearer {TOKEN}"),))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_stays_off_the_network_in_the_clear(tokens):
    """Without TLS it goes to loopback alone."""
    credentials = Credentials(_tokens_only(tokens))
    async with (
        open_channel("127.0.0.1:1", credentials) as near,
        open_channel("192.0.2.1:1", credentials) as far,
    ):
        assert near._sends_token
        assert not far._sends_token


async def test_a_fill_between_two_hosts(fleet, authority, tokens, caplog):
    """Two relays with mutual TLS and tokens announce, match and stream; no secret is logged."""
    caplog.set_level("DEBUG")
    here = await fleet.relay(security=secured(authority, tokens, "here"))
    there = await fleet.relay(join=here.address, security=secured(authority, tokens, "there"))
    await fleet.seed(here)
    target = await fleet.dummy(there)
    credentials = Credentials(secured(authority, tokens, "client"))
    async with RelayClient(there.address, credentials) as client:
        *_, last = [m async for m in client.pull("target", weights_pb2.PullOptions())]
        assert await client.return_mapping("target", "", 10) == 1
        assert len(await client.sources(Target())) == 2
    assert last.report.transport == "tcp"
    assert same_weights(fleet.layout, target.memory.contents(), fleet.data)
    assert here.holdings.leases.count() == 0
    assert TOKEN not in caplog.text
    assert "BEGIN" not in caplog.text


async def test_a_relay_without_a_known_token_says_so(fleet, tokens, tmp_path, caplog):
    """A relay whose token its directory does not know says why it knows nobody, and lives on."""
    weak = Tokens(tmp_path / "weak")
    tokens.write(f"relay {TOKEN}", f"generate {OTHER}")
    weak.write(f"generate {OTHER}", f"relay {TOKEN}x")
    here = await fleet.relay(security=_tokens_only(tokens))
    there = await fleet.relay(join=here.address, security=_tokens_only(weak))
    await fleet.seed(here)
    async with RelayClient(there.address, Credentials(_tokens_only(weak), "relay")) as client:
        assert await client.sources(Target()) == []
    assert not there._fleet.directory_reachable
    assert "a token that is known here is needed" in caplog.text
    assert TOKEN not in caplog.text
