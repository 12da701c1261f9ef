"""One target that reads from several seeds at once, through real relays on loopback."""

import asyncio

import pytest
from fakes import eventually, lay_out_bytes, random_bytes, same_weights

from relay_service.core.manifest import BLOCK_BYTES
from seedrelay.v1 import weights_pb2

BLOCKS = 48
SLOWLY = 20 * BLOCK_BYTES
"""Bytes per second of each seed: so few that nothing is over before a test has looked."""


class Seeds:
    """Two seeds and a target, each at a relay of its own."""

    def __init__(self, fleet) -> None:
        self.fleet = fleet
        fleet.layout = lay_out_bytes([BLOCK_BYTES] * BLOCKS)
        fleet.data = random_bytes(fleet.layout)
        self._pull: asyncio.Task | None = None

    async def start(self, **settings):
        """Starts all of them."""
        limit = {"egress_limit_bytes_per_second": SLOWLY}
        directory = await self.fleet.relay(**limit)
        spare = await self.fleet.relay(join=directory.address, **(limit | settings))
        self.relays = {"a": directory, "b": spare}
        self.seeds = {
            name: await self.fleet.seed(relay, name) for name, relay in self.relays.items()
        }
        self.here = await self.fleet.relay(join=directory.address)
        self.target = await self.fleet.dummy(self.here)
        await eventually(lambda: len(directory._fleet.known()) == 3)
        return self

    def pull(self, **options):
        """Starts to fill the target; returns the task of its report."""
        self._pull = asyncio.create_task(self._run(options))
        return self._pull

    async def _run(self, options):
        client = self.fleet.client(self.here)
        pull = client.pull("target", weights_pb2.PullOptions(**options))
        return [one async for one in pull][-1].report

    async def end(self) -> None:
        """Ends the pull of a test that has failed."""
        if self._pull:
            self._pull.cancel()
            await asyncio.gather(self._pull, return_exceptions=True)

    def both_gave(self, blocks: int) -> bool:
        """Whether so many blocks of each seed have landed."""
        running = self.here.transfers.running
        path = running[0].puller.report.path if running else []
        return len(path) == 2 and min(s.bytes_verified for s in path) >= blocks * BLOCK_BYTES

    def assert_filled(self, report) -> None:
        """Checks the bytes, that none came twice, and that nobody holds a lease."""
        assert same_weights(self.fleet.layout, self.target.memory.contents(), self.fleet.data)
        assert report.bytes_moved == BLOCKS * BLOCK_BYTES
        assert report.bytes_reread == 0
        assert sum(step.bytes_verified for step in report.path) == report.bytes_moved
        assert report.path[-1].reason == "complete"


@pytest.fixture
async def seeds(fleet):
    """Not started yet."""
    seeds = Seeds(fleet)
    yield seeds
    await seeds.end()


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_both_give(seeds, transport):
    """Each gives its part, and both leases are given back."""
    await seeds.start()
    report = await seeds.pull(transport=transport)
    seeds.assert_filled(report)
    assert sorted(step.source_instance for step in report.path) == ["a", "b"]
    assert {step.reason for step in report.path} == {"complete"}
    assert min(step.bytes_verified for step in report.path) >= BLOCKS // 8 * BLOCK_BYTES
    for relay in seeds.relays.values():
        assert relay.holdings.leases.count() == 0


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
@pytest.mark.parametrize("dying", ["a", "b"])
async def test_one_dies(seeds, transport, dying):
    """The other one gives the rest; what had come is kept."""
    await seeds.start()
    running = seeds.pull(transport=transport)
    await eventually(lambda: seeds.both_gave(4))
    seeds.seeds[dying].close()
    seeds.relays[dying].holdings.leases.end_all(dying, f"life of {dying}")
    report = await running
    seeds.assert_filled(report)
    left = {step.source_instance: step for step in report.path}
    assert left[dying].reason not in ("", "complete")
    assert left[dying].bytes_verified > 0
    assert report.path[-1].source_instance != dying


async def test_a_slow_one(seeds):
    """A seed that gives next to nothing is left while the other one gives, with the reason."""
    await seeds.start(egress_limit_bytes_per_second=BLOCK_BYTES // 4)
    report = await seeds.pull(transport="grpc")
    seeds.assert_filled(report)
    assert report.path[-1].source_instance == "a"
    assert report.path[-1].bytes_verified >= (BLOCKS - 4) * BLOCK_BYTES
    assert "slow" in report.path[0].reason


async def test_one_on_this_host_is_enough(seeds):
    """Nobody else is asked while memory of this host gives all."""
    await seeds.start()
    await seeds.fleet.seed(seeds.here, "near")
    report = await seeds.pull()
    seeds.assert_filled(report)
    assert [(s.source_instance, s.transport) for s in report.path] == [("near", "shm")]
