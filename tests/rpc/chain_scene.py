"""A seed and targets that fill one another, each at a real relay on loopback."""

import asyncio

from fakes import eventually, lay_out_bytes, random_bytes, same_weights

from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.record import record
from seedrelay.v1 import weights_pb2

BLOCKS = 24
SLOWLY = 20 * BLOCK_BYTES
"""Bytes per second: so few that nothing is over before a test has looked."""


class Chain:
    """A seed at a relay, and targets at relays of their own."""

    def __init__(self, fleet) -> None:
        self.fleet = fleet
        fleet.layout = lay_out_bytes([BLOCKS * BLOCK_BYTES])
        fleet.data = random_bytes(fleet.layout)
        self.relays, self.targets = {}, {}
        self._pulls = []

    async def start(self, *names: str, **settings):
        """Starts the seed's relay, which is the directory, and one relay with a dummy per name."""
        self.directory = self.relays["seed"] = await self.fleet.relay(**settings)
        self.seed = await self.fleet.seed(self.directory)
        for name in names:
            relay = await self.fleet.relay(join=self.directory.address, **settings)
            self.relays[name] = relay
            self.targets[name] = await self.fleet.dummy(relay, name)
        await eventually(lambda: len(self.known()) == 1 + len(names))
        return self

    def holding(self, name: str):
        """Returns what a target's relay knows of it."""
        return self.relays[name].holdings.get(name)

    def verified(self, name: str) -> int:
        """Blocks that a target has."""
        return sum(receiver.blocks_verified for receiver in self.holding(name).receivers)

    def pull(self, name: str, **options):
        """Starts to fill a target; returns the task of its report."""
        self._pulls.append(asyncio.create_task(self._pull(name, options)))
        return self._pulls[-1]

    async def end(self) -> None:
        """Ends every pull that is still running, and waits until it has."""
        for running in self._pulls:
            running.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)

    async def _pull(self, name, options):
        client = self.fleet.client(self.relays[name])
        return [one async for one in client.pull(name, weights_pb2.PullOptions(**options))][-1]

    async def filling(self, name: str, blocks: int = 1) -> None:
        """Waits until a target has some blocks, and the directory knows that it offers them."""
        await eventually(lambda: self.verified(name) >= blocks)
        await eventually(lambda: any(i.filling for i in self.known() if i.instance == name))

    def known(self):
        """Everyone whom the directory knows."""
        return self.directory._fleet.known()

    async def commit(self, name: str, last) -> None:
        """Makes a target ready, as its engine does."""
        client = self.fleet.client(self.relays[name])
        await client.return_mapping(name, "", 10)
        landed = [await client.manifest(name, "", 0)]
        await self.targets[name].commit(landed, last.report.weight_version)

    def assert_filled(self, name: str) -> None:
        """Checks the bytes of a target."""
        contents = self.targets[name].memory.contents()
        assert same_weights(self.fleet.layout, contents, self.fleet.data)


def sources(last) -> list[str]:
    """Names the sources that a pull tried."""
    return [step.source_instance for step in last.report.path]


async def lease_on(chain, name: str, holder: str = "reader", **changes):
    """Takes a lease on an incomplete target."""
    seen = record(chain.holding(name), chain.relays[name].address, 0).as_source()
    client = chain.fleet.client(chain.relays[name])
    return client, await client.acquire_lease(seen, holder, **changes)
