"""The data port wants the certificate that the service wants, and shows what is there by now."""

import asyncio
import dataclasses
import socket
import ssl

import pytest
from certificates import Authority
from fakes import random_bytes, same_weights

from clients.credentials import Credentials
from clients.errors import CallFailed
from clients.relay import RelayClient
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.transports.tcp_wire import HELLO_BYTES
from seedrelay.v1 import weights_pb2

LONG = lay_out(0, [UnitSpec("u", (TensorSpec("w", DType.U8, (20 * BLOCK_BYTES + 7,)),))])


@pytest.fixture
def authority(tmp_path):
    """The CA of the fleet."""
    return Authority(tmp_path)


async def port_of(relay, security) -> int:
    """Returns the data port of a relay."""
    async with RelayClient(relay.address, Credentials(security)) as client:
        return int((await client.data_address()).rpartition(":")[2])


def context_of(security) -> ssl.SSLContext:
    """Makes a client's context."""
    context = ssl.create_default_context(cafile=security.tls_ca)
    if security.tls_cert:
        context.load_cert_chain(security.tls_cert, security.tls_key)
    return context


def certificate_of(port: int, security) -> bytes:
    """Shakes hands, hears whether that was enough, and returns the other side's certificate."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
        context_of(security).wrap_socket(sock, server_hostname="127.0.0.1") as secured,
    ):
        certificate = secured.getpeercert(binary_form=True)
        secured.sendall(b"this is no grant".ljust(HELLO_BYTES))
        assert secured.recv(1) == b""
        return certificate


async def test_weights_over_tls(fleet, authority):
    """Weights of several connections arrive byte for byte, encrypted, on another host."""
    fleet.layout, fleet.data = LONG, random_bytes(LONG)
    here = await fleet.relay(security=authority.issue("here"))
    there = await fleet.relay(
        join=here.address, security=authority.issue("there"), data_connections=4
    )
    await fleet.seed(here)
    target = await fleet.dummy(there)
    async with RelayClient(there.address, Credentials(authority.issue("client"))) as client:
        options = weights_pb2.PullOptions(transport="tcp")
        *_, last = [m async for m in client.pull("target", options)]
        assert await client.return_mapping("target", "", 10) == 1
    assert (last.report.transport, last.report.bytes_reread) == ("tcp", 0)
    assert same_weights(LONG, target.memory.contents(), fleet.data)


async def test_who_has_no_certificate_of_the_fleet(fleet, authority, tmp_path):
    """Callers in the clear, without a certificate or with another CA's, get nothing."""
    security = authority.issue("here")
    relay = await fleet.relay(security=security)
    port = await port_of(relay, security)
    (tmp_path / "others").mkdir()
    stranger = Authority(tmp_path / "others", "other").issue("stranger")
    nobody = dataclasses.replace(security, tls_cert="", tls_key="")
    for one in (nobody, dataclasses.replace(stranger, tls_ca=security.tls_ca)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(certificate_of, port, one)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"SEEDTCP1".ljust(100, b"x"))
        assert b"SEEDTCP1" not in await asyncio.to_thread(_all_of, sock)
    assert await asyncio.to_thread(certificate_of, port, security)


async def test_a_certificate_that_is_replaced(fleet, authority):
    """The next handshake shows the new certificate; one that makes no sense changes nothing."""
    security = authority.issue("here")
    relay = await fleet.relay(security=security)
    port = await port_of(relay, security)
    client = authority.issue("client")
    first = await asyncio.to_thread(certificate_of, port, client)
    authority.issue("here")
    second = await asyncio.to_thread(certificate_of, port, client)
    assert second != first
    (authority.folder / "here.pem").write_text("nonsense")
    assert await asyncio.to_thread(certificate_of, port, client) == second


async def test_a_source_of_another_fleet(fleet, authority, tmp_path):
    """A data port whose certificate isn't of the fleet's CA is left before a grant is shown."""
    (tmp_path / "others").mkdir()
    other = Authority(tmp_path / "others", "other")
    fleet.layout, fleet.data = LONG, random_bytes(LONG)
    here = await fleet.relay(security=authority.issue("here"))
    there = await fleet.relay(join=here.address, security=authority.issue("there"))
    await fleet.seed(here)
    await fleet.dummy(there)
    impostor = other.issue("impostor")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=impostor.tls_ca)
    context.load_cert_chain(impostor.tls_cert, impostor.tls_key)
    here._data_server._tls.fresh = lambda: context
    async with RelayClient(there.address, Credentials(authority.issue("client"))) as client:
        with pytest.raises(CallFailed, match="CERTIFICATE_VERIFY_FAILED"):
            async for _ in client.pull("target", weights_pb2.PullOptions(transport="tcp")):
                pass
    assert here._data_server._grants.in_use <= 4, "granted, and never redeemed"
    assert here.holdings.leases.bytes_served["tcp"] == 0


def _all_of(sock) -> bytes:
    said = b""
    try:
        while part := sock.recv(1 << 16):
            said += part
    except ConnectionError:
        pass
    return said
