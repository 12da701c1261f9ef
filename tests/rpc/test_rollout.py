"""New weights for a whole fleet: what moves, and from whom."""

import asyncio

import pytest
from fakes import PROBE, LentMemory, Memory, eventually, lay_out_bytes

from clients.errors import DeadlineExceeded
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.match import Target
from relay_service.rpc import directory_link
from seedrelay.v1 import weights_pb2

EXPERTS = lay_out_bytes([BLOCK_BYTES] * 6)
"""Four experts of a block; two of them lie there once more."""


@pytest.fixture(autouse=True)
def _renew_often(monkeypatch):
    """Announces often: what is under test is not how long news take."""
    monkeypatch.setattr(directory_link, "RENEW_SECONDS", 0.2)


def experts(*kinds: int) -> bytes:
    """Returns contents of experts; equal ones have equal bytes."""
    return b"".join(bytes([kind]) * BLOCK_BYTES for kind in kinds)


OLD, NEW = experts(1, 2, 3, 4, 1, 2), experts(1, 5, 3, 4, 1, 5)
CHANGED = 2
"""Blocks that are other ones in the new version; they are the same bytes."""


class Rollout:
    """A seed that serves the new weights, and instances that serve the old ones."""

    def __init__(self, fleet, instances: int) -> None:
        self.fleet, self.instances = fleet, instances

    async def start(self, **settings) -> None:
        """Starts every instance on a relay of its own."""
        fleet = self.fleet
        self.home = await fleet.relay(**settings)
        memory = Memory([EXPERTS], [NEW])
        self.digest = memory.digest
        weights = Weights("v2", memory.digest, 1)
        await fleet.engine(self.home, "seed", memory=memory, weights=weights)
        self.relays = [
            await fleet.relay(join=self.home.address, **settings) for _ in range(self.instances)
        ]
        self.engines = [
            await fleet.engine(relay, f"instance {number}", OLD, layout=EXPERTS)
            for number, relay in enumerate(self.relays)
        ]

    async def update(self, number: int):
        """Updates one instance in place, by digest; returns what its relay reports."""
        relay, engine = self.relays[number], self.engines[number]
        lent = LentMemory([EXPERTS])
        await engine.lend(lent.descriptors)
        options = weights_pb2.PullOptions(
            source_instance="tiny", weights_digest=self.digest, timeout={"seconds": 30}
        )
        client = self.fleet.client(relay)
        *_, last = [one async for one in client.pull(engine.name, options)]
        for index in (1, 5):
            assert lent.bytes_at(index) == bytes([5]) * BLOCK_BYTES
        assert lent.allocated_blocks == CHANGED
        lent.close()
        await client.return_mapping(engine.name, "", 5)
        (arena,) = engine.memory.arenas
        arena.sequence += 1
        engine.memory.fill([NEW])
        arena.sequence += 1
        assert engine.memory.digest == self.digest
        await engine.update(
            state=State.READY, weights=Weights("v2", self.digest, 2), probe=PROBE,
            manifests=tuple(engine.memory.manifests),
        )  # fmt: skip
        return last.report

    def bytes_out(self, relay) -> int:
        """Bytes that a relay's instances have given."""
        return sum(relay.holdings.leases.bytes_served.values())


async def test_one_instance_after_another(fleet):
    """Only what differs moves, once for each instance; the updated ones give it to the next."""
    rollout = Rollout(fleet, 4)
    await rollout.start()
    sources = []
    for number in range(4):
        report = await rollout.update(number)
        assert report.weights_digest == rollout.digest
        assert (report.bytes_moved, report.bytes_copied) == (BLOCK_BYTES, BLOCK_BYTES)
        assert report.blocks_reused == EXPERTS.block_count - CHANGED
        sources.append(report.path[-1].source_instance)
        client = fleet.client(rollout.home)

        async def heard(client=client, number=number) -> bool:
            known = [m.instance for m in await client.sources(Target())]
            return sum(one.weights.digest == rollout.digest for one in known) == number + 2

        await eventually(heard)
    everyone = [rollout.home, *rollout.relays]
    assert sum(map(rollout.bytes_out, everyone)) == 4 * BLOCK_BYTES
    assert sources[0] == "seed"


async def test_all_at_once(fleet):
    """While the seed feeds one, the others wait for whoever has committed, within a bound."""
    rollout = Rollout(fleet, 4)
    await rollout.start(egress_limit_bytes_per_second=4 << 20)
    reports = await asyncio.gather(*map(rollout.update, range(4)))
    assert {report.bytes_moved for report in reports} == {BLOCK_BYTES}
    sources = [report.path[-1].source_instance for report in reports]
    assert sources.count("seed") < 4
    assert rollout.bytes_out(rollout.home) == sources.count("seed") * BLOCK_BYTES


async def test_a_digest_that_nobody_holds(fleet):
    """It is waited for; whoever holds other weights of the model is no source."""
    rollout = Rollout(fleet, 1)
    await rollout.start()
    dummy = await fleet.dummy(rollout.home, layout=EXPERTS)
    options = weights_pb2.PullOptions(weights_digest="ab" * 16, timeout={"nanos": 500_000_000})
    with pytest.raises(DeadlineExceeded, match="not filled within"):
        [one async for one in fleet.client(rollout.home).pull(dummy.name, options)]
    assert rollout.bytes_out(rollout.home) == 0
