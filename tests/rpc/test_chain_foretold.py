"""Lines whose members know through whom their blocks will come before they have a lease."""

import grpc
import pytest
from chain_scene import SLOWLY, lease_on
from fakes import PROBE, eventually

from clients.errors import CallFailed, ClientError
from seedrelay.v1 import relay_pb2, relay_pb2_grpc


async def ask_to_yield(chain, holder: str, *, follows: bool = True):
    """Asks the seed for a lease, to be sent on where it is busy."""
    relay = chain.directory
    (seed,) = [one for one in relay.holdings.records(relay.address) if one.instance == "seed"]
    stub = relay_pb2_grpc.RelayServiceStub(chain.fleet.client(relay).channel)
    return await stub.AcquireLease(relay_pb2.AcquireLeaseRequest(
        instance="seed", generation=seed.generation, epoch=seed.weights.epoch, yields=True,
        weights_digest=seed.weights.digest, holder=holder, follows=follows,
    ))  # fmt: skip


async def test_no_lease_waits_for_another_one(chain):
    """Who is sent on offers what will come, and gives leases, while it has none itself."""
    await chain.start("idle", "b")
    assert (await ask_to_yield(chain, "idle")).lease
    chain.pull("b")
    await eventually(lambda: chain.holding("b").offered.now)
    sent_on = (await ask_to_yield(chain, "c")).sent_on
    assert (sent_on.next_instance, sent_on.probe) == ("b", PROBE)
    assert list(sent_on.upstream_instances) == ["idle", "seed"]
    _, granted = await lease_on(chain, "b", "c")
    assert list(granted.upstream_instances) == ["idle", "seed"]
    assert granted.probe == PROBE
    for holder in ("idle", "seed", "b"):
        with pytest.raises(CallFailed, match="is filled from"):
            await lease_on(chain, "b", holder)
    assert chain.relays["idle"].holdings.leases.count() == 0, "it would have nothing to give"


async def test_an_offer_that_comes_otherwise_ends(chain):
    """Whoever reads what should have come through some, and comes through others, asks anew."""
    await chain.start("idle", "b", "other")
    assert (await ask_to_yield(chain, "idle")).lease
    pull = chain.pull("b", rate_limit_bytes_per_second=SLOWLY)
    await eventually(lambda: chain.holding("b").offered.now)
    early = chain.holding("b").offered.now.epoch
    client, _ = await lease_on(chain, "b", "c")
    chain.pull("idle", source_instance="other")
    chain.pull("other", source_instance="seed")
    await eventually(lambda: "other" in chain.holding("b").offered.now.upstream)
    with pytest.raises(CallFailed, match="is at epoch"):
        await client.manifest("b", "", 0, epoch=early)
    await pull
    chain.assert_filled("b")


async def test_who_does_not_follow_hears_why(chain):
    """A reader that knows nothing of being sent on gets an error that names whom to ask."""
    await chain.start("a")
    assert (await ask_to_yield(chain, "a")).lease
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask_to_yield(chain, "b", follows=False)
    error = ClientError.of(refused.value, "")
    assert (error.code, error.reason, error.details["next"]) == ("UNAVAILABLE", "SourceBusy", "a")
