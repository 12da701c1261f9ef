"""When weights are checked and when not, in which order, and how much one answer holds."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from engines import FakeRanks
from fakes import eventually, lay_out_bytes, random_bytes, replace, verified

from clients.errors import CallFailed
from engine_service.core.check import Checker
from engine_service.core.check_messages import Digested, DigestWeights, FoundWeights
from engine_service.core.check_report import CheckMode
from engine_service.core.comparing import entries
from engine_service.errors import NotReady, RankDied, RanksLost, RelayUnreachable
from engine_service.rpc import convert_check
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.instance import State, Weights
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import weights_digest
from seedrelay.v1 import engine_pb2

LAYOUT = lay_out_bytes([100, 200])


class FakeMemory(FakeRanks):
    """One rank with bytes; each check takes two pieces."""

    def __init__(self, layout=LAYOUT) -> None:
        super().__init__()
        self.layout = layout
        self.data = bytearray(random_bytes(layout))
        self.arenas = [SimpleNamespace(address=4096)]
        self.error: Exception | None = None
        self.asked: list[bool] = []
        """Of each piece: whether it was the first one."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def in_time(self, command, _kind, _seconds):
        """Digests half of it."""
        assert isinstance(command, DigestWeights)
        self.asked.append(command.begin)
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return [Digested(seconds=0.25, found=None if command.begin else self.found())]

    def found(self) -> FoundWeights:
        """Returns what lies there."""
        data = bytes(self.data)
        held = [data[e.offset : e.offset + e.nbytes] for e in entries(self.layout)]
        return FoundWeights(
            manifest=verified(self.layout, data), tensors=tuple(map(block_digest, held)),
            address=4096,
        )  # fmt: skip


@pytest.fixture
def memory(service):
    """The rank of the service."""
    ranks, instance = FakeMemory(), service.instance
    instance.ranks = service.ranks = instance.engine._runner = ranks
    instance.manifests = [ranks.found().manifest]
    instance.engine.weights = Weights("v1", weights_digest(instance.manifests), 7)
    return ranks


async def _check(service, **asked):
    return await service.client.check(engine_pb2.CheckWeightsRequest(**asked), 20)


async def test_the_last_check_is_kept(service, memory):
    """With its time and all that it found, until the next one."""
    assert service.instance.last_check is None
    began = time.time()
    found = await _check(service)
    assert (found.equal, found.weight_version, found.epoch) == (True, "v1", 7)
    assert found.seconds_paused == 0.5
    assert memory.asked == [True, False]
    memory.data[0] ^= 1
    assert not (await _check(service)).equal
    kept = service.instance.last_check
    assert (kept.equal, kept.mode, kept.weights.epoch) == (False, CheckMode.DIGEST, 7)
    assert began <= kept.ended_at <= time.time()
    memory.error = RankDied("rank 0 has died")
    with pytest.raises(CallFailed, match="rank 0 has died"):
        await _check(service)
    assert service.instance.last_check is kept


async def test_a_rank_that_lies_elsewhere(service, memory):
    """Its address is one of the differences."""
    memory.arenas[0].address = 8192
    (one,) = (await _check(service)).differences
    assert (one.what, one.block, one.expected) == ("address of the arena", -1, "0x2000")
    assert one.found == "0x1000"


@pytest.mark.parametrize("state", list(State))
async def test_weights_that_serve_are_checked(service, memory, state):
    """Paused or not; those that are being applied are waited for."""
    service.enter(state)
    check = asyncio.create_task(_check(service))
    if state is State.UPDATING:
        await eventually(service.servicer._checker._checking.locked)
        service.instance.engine.weights = replace(service.instance.engine.weights, epoch=8)
        assert memory.asked == []
        service.instance.lifecycle.to(State.PAUSED)
        assert (await check).epoch == 8
    elif state.holds_weights:
        assert (await check).equal
    else:
        with pytest.raises(CallFailed, match=f"one is {state}") as refused:
            await check
        assert (refused.value.code, memory.asked) == ("FAILED_PRECONDITION", [])


@pytest.mark.parametrize("outlasts", [True, False])
async def test_an_update_meanwhile(service, memory, outlasts):
    """What was digested before and while it was applied is forgotten, whichever ends first."""
    memory.may_answer.clear()
    check = asyncio.create_task(_check(service))
    await eventually(lambda: memory.asked)
    service.instance.lifecycle.to(State.UPDATING)
    if outlasts:
        memory.may_answer.set()
        await eventually(lambda: len(memory.asked) == 2)
    memory.data[5] ^= 1
    service.instance.manifests = [memory.found().manifest]
    digest = weights_digest(service.instance.manifests)
    service.instance.engine.weights = Weights("v2", digest, 8)
    service.instance.lifecycle.to(State.READY)
    memory.may_answer.set()
    found = await check
    assert (found.equal, found.weight_version, found.epoch) == (True, "v2", 8)
    assert memory.asked == [True, False] * 2


async def test_tensors_of_former_weights_prove_nothing(service, memory):
    """After an update a check cannot tell again which of several in a block it is."""
    tensors = tuple(TensorSpec(name, DType.U8, (8,)) for name in "ab")
    memory.layout = lay_out(0, [UnitSpec("u", tensors)])
    memory.data = bytearray(memory.layout.data_bytes)

    def serve(version, epoch):
        service.instance.manifests = [memory.found().manifest]
        digest = weights_digest(service.instance.manifests)
        service.instance.engine.weights = Weights(version, digest, epoch)

    serve("v1", 8)
    assert (await _check(service)).equal
    memory.data[0] = 1
    serve("v2", 9)
    memory.data[64] = 1
    suspected = "contents, or those of 1 more in its block"
    found = (await _check(service)).differences
    assert [(one.tensor, one.what) for one in found] == [("a", suspected), ("b", suspected)]
    memory.data[64] = 0
    await _check(service)
    memory.data[64] = 1
    found = (await _check(service)).differences
    assert [(one.tensor, one.what) for one in found] == [("b", "contents")]


async def test_one_check_at_a_time(service, memory):
    """Others wait in their order, for a while; who leaves is not waited for."""
    checker = Checker(service.instance, wait_seconds=0.05)
    memory.may_answer.clear()
    first = asyncio.create_task(checker.check(CheckMode.DIGEST))
    await eventually(lambda: memory.asked)
    with pytest.raises(NotReady, match=r"still run after 0.05 s"):
        await checker.check(CheckMode.DIGEST)
    checker._wait_seconds = 20
    # Were they not in order, there would be no snapshot yet.
    modes = (CheckMode.SNAPSHOT, CheckMode.COMPARE, CheckMode.DIGEST)
    snapshot, compare, digest = [asyncio.create_task(checker.check(mode)) for mode in modes]
    await asyncio.sleep(0)
    assert memory.asked == [True]
    first.cancel()
    digest.cancel()
    memory.may_answer.set()
    assert (await snapshot).equal
    assert (await compare).equal
    assert memory.asked == [True, *[True, False] * 2]
    await asyncio.gather(first, digest, return_exceptions=True)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"mode": 77}, "no such mode"),
        ({"mode": engine_pb2.CHECK_MODE_DIFF}, "named for DIFF"),
        ({"against": "two"}, "named for DIFF"),
    ],
)
async def test_a_check_that_is_wrong(service, memory, asked, words):
    """Is refused before anything is digested."""
    with pytest.raises(CallFailed, match=words) as refused:
        await _check(service, **asked)
    assert (refused.value.code, memory.asked) == ("INVALID_ARGUMENT", [])


async def test_very_many_differences(service, memory, monkeypatch):
    """The first are told, and how many there are; tensors that do not fit are refused."""
    monkeypatch.setattr(convert_check, "MOST_DIFFERENCES", 1)
    await _check(service)
    memory.data[:] = bytes(len(memory.data))
    found = await _check(service)
    assert ([one.tensor for one in found.differences], found.difference_count) == (["w.0"], 2)
    monkeypatch.setattr(convert_check, "MESSAGE_BYTES", 300)
    with pytest.raises(CallFailed, match="do not fit") as refused:
        await _check(service, list_tensors=True)
    assert refused.value.code == "RESOURCE_EXHAUSTED"


async def test_manifests_of_another_instance(fleet):
    """Come from the relay that announced it, whole and as announced."""
    relay = await fleet.relay()
    seed = await fleet.seed(relay)
    link = GrpcRelayLink(relay.address)
    try:
        (offer,) = await link.offers()
        assert await link.manifests_of(offer) == seed.memory.manifests
        other = replace(offer, weights=replace(offer.weights, digest="ab" * 16))
        with pytest.raises(RelayUnreachable, match="holds other weights than it announced"):
            await link.manifests_of(other)
        with pytest.raises(RelayUnreachable, match="not attached"):
            await link.manifests_of(replace(offer, generation="another life"))
    finally:
        await link.close()


async def test_a_snapshot_of_other_ranks(service, memory):
    """Ranks were lost, or have come: it is refused in words."""
    await _check(service, mode=engine_pb2.CHECK_MODE_SNAPSHOT)
    service.instance.manifests *= 2
    with pytest.raises(CallFailed, match="the snapshot is of 1 ranks, and there are 2"):
        await _check(service, mode=engine_pb2.CHECK_MODE_COMPARE)


async def test_others_hold_the_weights_meanwhile(service, memory):
    """Ranks that came or went are no error: all is digested anew."""
    answer, memory.error = memory.in_time, None

    async def moved(command, kind, seconds):
        memory.in_time = answer
        raise RanksLost("other ranks compute together by now")

    memory.in_time = moved
    assert (await _check(service)).equal
