"""What a gateway may ask of an engine that demands mutual TLS and tokens, over a real server."""

import contextlib
import dataclasses

import grpc
import pytest
from certificates import Authority, Tokens
from engines import Service
from google.protobuf import message_factory
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from clients.credentials import Credentials, channel_credentials
from relay_service.core.tokens import SCOPES

METHODS = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods
UNOFFERED = {"Embed", "StartProfile", "StopProfile", "SubscribeKvEvents"}
TOKENS = {scope: f"token-of-the-scope-{scope}" for scope in SCOPES}
GENERATE = vllm_engine_pb2.GenerateRequest(
    request_id="one", tokenized={"input_ids": range(9)}, sampling_params={"max_tokens": 3}
)


@pytest.fixture
def secured(tmp_path):
    """Certificates of a service, and tokens that have one scope each."""
    lines = (f"{scope} {token}" for scope, token in TOKENS.items())
    file = Tokens(tmp_path / "tokens").write(*lines)
    return dataclasses.replace(Authority(tmp_path).issue("service"), token_file=file)


@pytest.fixture
async def service(secured):
    """A ready engine that demands both."""
    service = Service()
    await service.start(credentials=Credentials(secured))
    yield service
    await service.stop()


@pytest.fixture
async def channel(service, secured):
    """A connection with a certificate; tokens go along call by call."""
    credentials = channel_credentials(Credentials(secured).material())
    async with grpc.aio.secure_channel(service.address, credentials) as channel:
        yield channel


async def statuses(channel: grpc.aio.Channel, token: str | None) -> dict[str, str]:
    """Calls every method of the protocol; returns how each call ended."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    found = {}
    for method in METHODS:
        empty = message_factory.GetMessageClass(method.input_type)()
        request = GENERATE if method.name == "Generate" else empty
        call = getattr(stub, method.name)(request, metadata=metadata, timeout=20)
        with contextlib.suppress(grpc.aio.AioRpcError):
            if method.server_streaming:
                assert [message async for message in call]
            else:
                await call
        found[method.name] = (await call.code()).name
    return found


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (None, "UNAUTHENTICATED"),
        ("token-of-nobody-here", "UNAUTHENTICATED"),
        (TOKENS["relay"], "PERMISSION_DENIED"),
    ],
)
async def test_whom_nothing_is_answered(service, channel, token, status):
    """Without a token, or with one of a relay, nothing is said, nothing is made or forgotten."""
    assert await statuses(channel, token) == {method.name: status for method in METHODS}
    assert service.ranks.steps == []


async def test_a_gateway(service, channel):
    """The scope `generate` allows all that a gateway needs, but for emptying the cache."""
    found = await statuses(channel, TOKENS["generate"])
    assert found.pop("FlushCache") == "PERMISSION_DENIED"
    assert {name for name, status in found.items() if status == "UNIMPLEMENTED"} == UNOFFERED
    assert {found[name] for name in found.keys() - UNOFFERED} == {"OK"}
    assert service.scheduler.pool.cached  # nobody has emptied it


async def test_an_operator(service, channel):
    """The scope `control` empties the cache, and makes no answers."""
    await statuses(channel, TOKENS["generate"])
    found = await statuses(channel, TOKENS["control"])
    assert found.pop("FlushCache") == "OK"
    assert set(found.values()) == {"PERMISSION_DENIED"}
    assert service.scheduler.pool.cached == 0


async def test_tls_comes_first(service, secured):
    """A known token without a certificate reaches nobody, in the clear or over TLS."""
    alone = dataclasses.replace(secured, tls_cert="", tls_key="")
    over_tls = channel_credentials(Credentials(alone).material())
    for channel in (
        grpc.aio.insecure_channel(service.address),
        grpc.aio.secure_channel(service.address, over_tls),
    ):
        async with channel:
            found = await statuses(channel, TOKENS["generate"])
        assert set(found.values()) == {"UNAVAILABLE"}
    assert service.ranks.steps == []
